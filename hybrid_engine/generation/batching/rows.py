"""Draws the rows of one turn at once, each by its own options.

The options are put into tensors when the rows change, and these serve until the next change. Rules that read a row's
tokens are applied row by row, and only to rows that have any. S rows, n of them sampled, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from transformers import LogitsProcessorList

from hybrid_engine.generation.batching.processors import RowProcessors, build_row_processors, warp
from hybrid_engine.generation.request.core import Sequence
from hybrid_engine.ops import SamplingOptions
from hybrid_engine.ops.log_prob import sampled_logprobs, token_logprobs
from hybrid_engine.ops.sample_rows import (
    adjust_rows,
    build_row_options,
    count_penalties,
    filter_rows,
    pick_rows,
)

Result = TypeVar("Result")


class DrawnRows(NamedTuple):
    """Tokens drawn for S rows, on their device."""

    tokens: torch.Tensor
    """`[S]` int64."""
    logprobs: torch.Tensor
    """`[S]` fp32, under softmax(logits / temperature), unfiltered, unless the row's `logprobs` selects others."""
    ends: torch.Tensor
    """`[S]` bool: whether the token ends its sequence."""
    tops: torch.Tensor | None = None
    """`[2, S, k]` fp64: ids and log-probabilities of the likeliest tokens; None if no row requests them."""


class RowState(NamedTuple):
    """State of S rows before a draw, on their device."""

    keys: torch.Tensor
    """`[S]` int64; key and `draws` together determine the noise."""
    draws: torch.Tensor
    """`[S]` int64: number of tokens drawn so far."""
    seen: torch.Tensor | None
    """`[S, V]` bool: tokens of prompt and response; None if no row has a repetition penalty."""
    counts: torch.Tensor | None
    """`[S, V]` int32: counts of the response's tokens; None if no row has a presence or frequency penalty."""


class MixedRows:
    """Draws for `sequences`, in their order, from logits over `vocab` tokens on `device`."""

    def __init__(
        self,
        sequences: list[Sequence],
        vocab: int,
        device: torch.device,
        all_rows: SamplingOptions | None = None,
        *,
        is_exact: bool = False,
    ):
        """Builds the option tensors of the rows.

        `all_rows`: sampling options of every row; their rules that read tokens are then applied elsewhere. `is_exact`:
        that of `SampleOp`.
        """
        self.sequences, self.device, self.is_exact = sequences, device, is_exact
        sampling = [all_rows or sequence.options.sampling for sequence in sequences]
        self.options = build_row_options(sampling, vocab, device)
        rules = [sequence.options.rules for sequence in sequences]
        self._ruled = [row for row, rule in enumerate(rules) if all_rows is None and rule.changes_by_tokens]
        for row in self._ruled:
            self._attempt(row, partial(self._build_processors, sequences[row]))
        self._presence = self._column([rule.presence_penalty for rule in rules])
        self._frequency = self._column([rule.frequency_penalty for rule in rules])
        cells = [(row, token, bias) for row, rule in enumerate(rules) for token, bias in rule.logit_bias]
        self._biased = self._cells(cells)
        kinds = [("scaled" if rule.logprobs == "scaled" else rule.logprobs) for rule in rules]
        self._raw, self._processed = (self._indices([k == kind for k in kinds]) for kind in ("raw", "processed"))
        self._num_tops = min(vocab, max((rule.top_logprobs for rule in rules), default=0))
        self._warped = self._group_warped()

    def _column(self, numbers: list[float]) -> torch.Tensor | None:
        return torch.tensor(numbers, device=self.device)[:, None] if any(numbers) else None

    def _cells(self, cells: list[tuple[int, int, float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        if not cells:
            return None
        rows, tokens, biases = zip(*cells, strict=True)
        places = torch.tensor((rows, tokens), device=self.device)
        return places[0], places[1], torch.tensor(biases, device=self.device)

    def _indices(self, flags: list[bool]) -> torch.Tensor | None:
        rows = [row for row, flag in enumerate(flags) if flag]
        return torch.tensor(rows, device=self.device) if rows else None

    def _build_processors(self, sequence: Sequence) -> None:
        if sequence.processors is None:
            length = len(sequence.prompt.tokens)
            sequence.processors = build_row_processors(sequence.options, length, self.device)

    def _group_warped(self) -> list[tuple[Sequence, torch.Tensor]]:
        """Groups the sampled rows whose filters the ops lack by their options: one row of each, and the places."""
        sampled = [sequence for sequence in self.sequences if sequence.options.do_sample]
        groups: dict[tuple[float, float, float], list[int]] = {}
        for place, sequence in enumerate(sampled):
            rules = sequence.options.rules
            groups.setdefault((rules.typical_p, rules.epsilon_cutoff, rules.eta_cutoff), []).append(place)
        groups.pop((1.0, 0.0, 0.0), None)
        return [(sampled[rows[0]], torch.tensor(rows, device=self.device)) for rows in groups.values()]

    def draw(self, logits: torch.Tensor, state: RowState) -> DrawnRows:
        """Draws one token for each row of `logits [S, V]` fp32, which are not changed."""
        adjusted = self._apply_rules(logits, state)
        scores = filter_rows(adjusted, self.options)
        for sequence, rows in self._warped:
            scores = scores.index_copy(0, rows, warp(scores[rows], sequence.options))
        tokens = pick_rows(adjusted, scores, self.options, state.keys, state.draws)
        ends = (tokens[:, None] == self.options.ends).any(1)
        reported = self._reported(logits, adjusted, scores)
        measure = token_logprobs if self.is_exact else sampled_logprobs
        return DrawnRows(tokens, measure(reported, tokens), ends, self._tops(reported))

    def _apply_rules(self, logits: torch.Tensor, state: RowState) -> torch.Tensor:
        """Returns the logits `[S, V]` after the rules and penalties of the rows, before temperature and filters."""
        adjusted = self._ask(logits, lambda processors: processors.before)
        adjusted = self._penalise(adjusted, state)
        return self._ask(adjusted, lambda processors: processors.after)

    def _ask(self, scores: torch.Tensor, part: Callable[[RowProcessors], LogitsProcessorList]) -> torch.Tensor:
        """Applies this part of the processors to `scores`, for rows that have any."""
        for row in self._ruled:
            sequence = self.sequences[row]
            if sequence.error is None and (processors := part(sequence.processors)):
                ask = partial(processors, self._tokens(sequence), scores[row : row + 1].clone())
                scores = _with_row(scores, row, self._attempt(row, ask))
        return scores

    def _attempt(self, row: int, action: Callable[[], Result]) -> Result | None:
        """Returns the result of `action`, a rule of one row, or stores its error, which ends the row."""
        try:
            return action()
        except Exception as error:
            self.sequences[row].error = error
            return None

    def _penalise(self, adjusted: torch.Tensor, state: RowState) -> torch.Tensor:
        """Applies biases and penalties on single tokens to all rows at once."""
        if self._biased is not None:
            rows, tokens, biases = self._biased
            adjusted = adjusted.index_put((rows, tokens), biases, accumulate=True)
        penalties = None
        if state.counts is not None and (self._presence is not None or self._frequency is not None):
            penalties = count_penalties(state.counts, self._presence, self._frequency)
        return adjust_rows(adjusted, self.options, state.draws, state.seen, penalties)

    def _tokens(self, sequence: Sequence) -> torch.Tensor:
        return torch.tensor([sequence.prompt.tokens + sequence.tokens], device=self.device)

    def _reported(self, logits: torch.Tensor, adjusted: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns the scores `[S, V]` whose log-softmax is reported."""
        reported = logits if self.options.temperature is None else logits / self.options.temperature
        if self._raw is not None:
            reported = reported.index_copy(0, self._raw, logits[self._raw])
        if self._processed is not None:
            final = adjusted if self.options.sampled is None else adjusted.index_copy(0, self.options.sampled, scores)
            reported = reported.index_copy(0, self._processed, final[self._processed])
        return reported

    def _tops(self, reported: torch.Tensor) -> torch.Tensor | None:
        if self._num_tops == 0:
            return None
        values, ids = reported.log_softmax(-1).topk(self._num_tops, dim=-1)
        return torch.stack((ids.double(), values.double()))


def _with_row(scores: torch.Tensor, row: int, changed: torch.Tensor | None) -> torch.Tensor:
    return scores if changed is None else torch.cat((scores[:row], changed, scores[row + 1 :]))
