"""Rollouts with the user's functions: logits_processor, prefix_allowed_tokens_fn, stopping_criteria, streamer.

The functions get transformers' own arguments, `input_ids [R, P+t]` padded as in transformers and the scores of all
rows. So all rows draw their t-th token in the same turn. Finished rows leave nevertheless: they take no further pass
over the layers, `input_ids` has padding for them, and their scores are those of their last token.

R rows, P padded prompt length, t tokens drawn, V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

from hybrid_engine.generation.core import Admission, Sequence
from hybrid_engine.generation.decode import Drawn, send_to_host
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.generation.sampling import MixedRows, RowState, merge_processors, processors_after, processors_before
from hybrid_engine.generation.step import TextGeneration

NAMES = ("logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria", "streamer")


@dataclass(frozen=True, kw_only=True)
class UserFunctions:
    """The user's functions, in the form that transformers takes."""

    logits_processor: LogitsProcessorList
    prefix_allowed_tokens_fn: Any
    stopping_criteria: StoppingCriteriaList
    streamer: Any
    is_min_new: bool = False
    """Whether `min_new_tokens` was passed."""


def read_functions(merged: dict[str, Any]) -> UserFunctions | None:
    """Returns the functions among the options `merged`, or None if there are none.

    Raises ValueError for a value that is not a function, a list of functions or a streamer.
    """
    given = {name: merged.get(name) for name in NAMES}
    for name in ("logits_processor", "stopping_criteria"):
        value = given[name]
        if value is not None and (not isinstance(value, list | tuple) or not all(map(callable, value))):
            raise ValueError(f"{name}={value!r} must be a list of functions of (input_ids, scores)")
    prefix, streamer = given["prefix_allowed_tokens_fn"], given["streamer"]
    if prefix is not None and not callable(prefix):
        raise ValueError(f"prefix_allowed_tokens_fn={prefix!r} must be a function of (batch_id, input_ids)")
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise ValueError(f"streamer={streamer!r} must have put() and end(), as transformers' BaseStreamer")
    if streamer is None and prefix is None and not any(given[name] for name in NAMES[::2]):
        return None
    return UserFunctions(
        logits_processor=LogitsProcessorList(given["logits_processor"] or []),
        prefix_allowed_tokens_fn=prefix,
        stopping_criteria=StoppingCriteriaList(given["stopping_criteria"] or []),
        streamer=streamer,
        is_min_new=merged.get("min_new_tokens") is not None,
    )


class RowsInStep(MixedRows):
    """All rows of a rollout, with rules and user functions that are called for all rows at once."""

    def __init__(
        self, sequences: list[Sequence], functions: UserFunctions, width: int, vocab: int, device: torch.device
    ):
        """`width`: P, the number of columns of the padded prompts."""
        options, prefix = sequences[0].options, functions.prefix_allowed_tokens_fn
        ends, penalty = _early_ends(options, width, functions.is_min_new), _penalty(options)
        before, after = processors_before(options), processors_after(options, width, device, prefix, ends)
        merged = merge_processors([*before, *penalty, *after], functions.logits_processor)
        # Stand-ins for options that `MixedRows` applies itself, unless processors of the user replaced all of them.
        stand_ins = [*penalty, *ends]
        left = {type(stand_in) for stand_in in stand_ins if stand_in in merged}
        sampling = replace(
            options.sampling,
            repetition_penalty=options.repetition_penalty if left & {type(each) for each in penalty} else 1.0,
            min_new_tokens=options.min_new_tokens if left & {type(each) for each in ends} else 0,
        )
        super().__init__(sequences, vocab, device, sampling, is_exact=True)
        first = len(before) + len(penalty)
        self.before, self.after = (
            LogitsProcessorList([processor for processor in part if processor not in stand_ins])
            for part in (merged[:first], merged[first:])
        )
        self.input_ids = torch.empty(0)

    def _apply_rules(self, logits: torch.Tensor, state: RowState) -> torch.Tensor:
        adjusted = self._penalise(self.before(self.input_ids, logits.clone()), state)
        return self.after(self.input_ids, adjusted)


def _penalty(options: GenerationOptions) -> list[LogitsProcessor]:
    return [RepetitionPenaltyLogitsProcessor(options.repetition_penalty)] if options.repetition_penalty != 1.0 else []


def _early_ends(options: GenerationOptions, width: int, is_min_new: bool) -> list[LogitsProcessor]:
    """Returns transformers' processors for `min_length` and, if it was passed, `min_new_tokens`."""
    least, ends = options.min_new_tokens, list(options.eos_token_ids)
    if least == 0 or not ends:
        return []
    made: list[LogitsProcessor] = [MinLengthLogitsProcessor(width + least, ends)]
    return [*made, MinNewTokensLengthLogitsProcessor(width, least, ends)] if is_min_new else made


class InStep:
    """Draws for the rows of a rollout that stay in step; the `choice` of an `OpenStep`.

    Args:
        sequences: all sequences, in the order of their rows.
        input_ids: `[R, P]` padded prompts.
        mask: `[R, P]` bool, True for tokens.
    """

    def __init__(
        self,
        sequences: list[Sequence],
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        functions: UserFunctions,
        vocab: int,
    ):
        self.sequences, self.functions, self.vocab = sequences, functions, vocab
        self.device, self.width = input_ids.device, input_ids.shape[1]
        self.input_ids, self.mask = input_ids, mask
        self.options: GenerationOptions = sequences[0].options
        self.rows = RowsInStep(sequences, functions, self.width, vocab, self.device)
        self.keys = torch.tensor([sequence.key for sequence in sequences], device=self.device)
        self.logits: torch.Tensor | None = None  # [R, V], those of each row's last turn
        if functions.streamer is not None:
            functions.streamer.put(input_ids.cpu())

    def __call__(self, rows: list[Sequence], logits: torch.Tensor) -> Drawn:
        """Draws the next token of `rows` from `logits [S, V]` fp32; all other rows have finished."""
        places = torch.tensor([row.row for row in rows], device=self.device)
        self.logits = logits if self.logits is None else self.logits.index_copy(0, places, logits)
        self.rows.input_ids = self.input_ids
        drawn = self.rows.draw(self.logits, self._state())
        tokens = torch.full_like(self.keys, self.options.pad_token_id).index_copy_(0, places, drawn.tokens[places])
        self.input_ids = torch.cat((self.input_ids, tokens[:, None].to(self.input_ids.dtype)), 1)
        is_done = drawn.ends
        if self.functions.stopping_criteria:
            is_done = is_done | self.functions.stopping_criteria(self.input_ids, None).to(self.device)
        if self.functions.streamer is not None:
            self.functions.streamer.put(tokens.cpu())
        results = torch.stack((drawn.tokens.double(), drawn.logprobs.double(), is_done.double()))[:, places]
        return send_to_host(results, None if drawn.tops is None else drawn.tops[:, places]).read()

    def _state(self) -> RowState:
        said = self.input_ids[:, self.width :]
        counts = torch.zeros(len(said), self.vocab, dtype=torch.int32, device=self.device)
        counts.scatter_add_(1, said, torch.ones_like(said, dtype=torch.int32))
        seen = torch.zeros(counts.shape, dtype=torch.int32, device=self.device)
        seen.scatter_add_(1, self.input_ids[:, : self.width], self.mask.int())
        draws = torch.full_like(self.keys, said.shape[1])
        return RowState(self.keys, draws, (seen + counts) > 0, counts)

    def finish(self) -> None:
        """Tells the streamer that no more tokens come."""
        if self.functions.streamer is not None:
            self.functions.streamer.end()


class GenerationInStep(TextGeneration):
    """A TextGeneration that starts to draw when the last prompt is prefilled."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._held: dict[Sequence, torch.Tensor] = {}  # prefilled rows with their logits

    def _enter(self, admission: Admission, own: dict[Sequence, torch.Tensor] | None = None) -> None:
        for sequence in admission.sequences:
            self._held[sequence] = (own or {})[sequence]
        if self._held and not self.scheduler.waiting:
            rows = sorted(self._held, key=lambda sequence: sequence.row)
            self._note(rows, self.step.draw(rows, torch.stack([self._held[row] for row in rows])))
            self._held.clear()

    def _decode(self) -> None:
        if self._held:
            self.idle()
        else:
            super()._decode()
