"""Draws the rows of one turn at once, each by its own options, and tells which rows have ended.

The options are put into tensors when the rows change, and these serve until the next change. Rules that read a row's
tokens are applied row by row, by transformers' logits processors in its order, and only to rows that have any.
`MixedRows` applies repetition penalty, early ends and rules on single tokens to all rows at once, between the two lists
of processors. S rows, n of them sampled, V vocabulary.

`InStep` serves the user's functions: logits_processor, prefix_allowed_tokens_fn, stopping_criteria, streamer.
The functions get transformers' own arguments, `input_ids [R, P+t]` padded as in transformers and the scores of all
rows. So all rows draw their t-th token in the same turn. Finished rows leave nevertheless: they take no further pass
over the layers, `input_ids` has padding for them, and their scores are those of their last token.

R rows, P padded prompt length, t tokens drawn, V vocabulary.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from transformers import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    StopStringCriteria,
)
from transformers.generation import RepetitionPenaltyLogitsProcessor
from transformers.generation import logits_process as transformers_logits
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from hybrid_engine.containers.device import record_event
from hybrid_engine.generation.core import Draw, Drawn, Sequence, UserFunctions
from hybrid_engine.generation.detokenize import first_stop
from hybrid_engine.generation.guides import GuidedTokens
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.ops import SamplingOptions
from hybrid_engine.ops.sample import sampled_logprobs, token_logprobs
from hybrid_engine.ops.sample_rows import adjust_rows, build_row_options, count_penalties, filter_rows, pick_rows
from hybrid_engine.ops.support_log_prob import pack_support, read_records

Result = TypeVar("Result")


def processors_before(options: GenerationOptions) -> LogitsProcessorList:
    """Processors that run before the penalties."""
    bias = options.rules.sequence_bias
    given: dict[tuple[int, ...], float] = dict(bias)
    return LogitsProcessorList([transformers_logits.SequenceBiasLogitsProcessor(given)] if bias else [])  # type: ignore[arg-type]


def processors_after(
    options: GenerationOptions,
    prompt_length: int,
    device: torch.device,
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
    early_ends: Iterable[LogitsProcessor] = (),
) -> LogitsProcessorList:
    """Processors between penalties and temperature; `early_ends` are inserted where transformers forbids early ends."""
    rules, ends, made = options.rules, list(options.eos_token_ids), LogitsProcessorList()
    if rules.no_repeat_ngram_size:
        made.append(transformers_logits.NoRepeatNGramLogitsProcessor(rules.no_repeat_ngram_size))
    bad_words = [list(ids) for ids in rules.bad_words_ids if not (len(ids) == 1 and ids[0] in ends)]
    if bad_words:
        made.append(transformers_logits.NoBadWordsLogitsProcessor(bad_words))
    made.extend(early_ends)
    if prefix_allowed_tokens_fn is not None:
        made.append(transformers_logits.PrefixConstrainedLogitsProcessor(prefix_allowed_tokens_fn, 1))
    if rules.forced_bos_token_id is not None:
        made.append(transformers_logits.ForcedBOSTokenLogitsProcessor(rules.forced_bos_token_id))
    if rules.forced_eos_token_id:
        longest, forced = prompt_length + options.max_new_tokens, list(rules.forced_eos_token_id)
        made.append(transformers_logits.ForcedEOSTokenLogitsProcessor(longest, forced, device=str(device)))
    if rules.exponential_decay_length_penalty is not None and ends:
        decay = rules.exponential_decay_length_penalty
        made.append(transformers_logits.ExponentialDecayLengthPenalty(decay, ends, prompt_length))
    if rules.suppress_tokens:
        made.append(transformers_logits.SuppressTokensLogitsProcessor(rules.suppress_tokens, device=str(device)))
    if rules.begin_suppress_tokens:
        begin = prompt_length + (rules.forced_bos_token_id is not None)
        made.append(transformers_logits.SuppressTokensAtBeginLogitsProcessor(rules.begin_suppress_tokens, begin))
    if rules.guide is not None:
        made.append(GuidedTokens(rules.guide, rules.tokenizer, options.eos_token_ids, prompt_length))
    return made


def merge_processors(defaults: Iterable[Any], given: Iterable[Any]) -> list[Any]:
    """Merges the user's processors `given` into `defaults`: one replaces the default of its type, the others come last.

    Source: transformers, `GenerationMixin._merge_criteria_processor_list`.
    """
    merged = [next((own for own in given if type(own) is type(default)), default) for default in defaults]
    for own in given:
        if own not in merged:
            merged.append(own)
    return merged


class RowProcessors(NamedTuple):
    """The processors of one row; `guide` is one of those in `after`, or None."""

    before: LogitsProcessorList
    after: LogitsProcessorList
    guide: GuidedTokens | None


def build_row_processors(options: GenerationOptions, prompt_length: int, device: torch.device) -> RowProcessors:
    """Builds the processors of a row whose prompt has `prompt_length` tokens from its options."""
    after = processors_after(options, prompt_length, device)
    guides = [processor for processor in after if isinstance(processor, GuidedTokens)]
    return RowProcessors(processors_before(options), after, guides[0] if guides else None)


def warp(scores: torch.Tensor, options: GenerationOptions) -> torch.Tensor:
    """Applies the filters that `sample_rows.py` does not have to `scores [m, V]` of rows with these options."""
    rules = options.rules
    no_tokens = torch.empty(0)
    if rules.typical_p < 1.0:
        scores = transformers_logits.TypicalLogitsWarper(rules.typical_p)(no_tokens, scores)
    if 0.0 < rules.epsilon_cutoff < 1.0:
        scores = transformers_logits.EpsilonLogitsWarper(rules.epsilon_cutoff)(no_tokens, scores)
    if 0.0 < rules.eta_cutoff < 1.0:
        eta = transformers_logits.EtaLogitsWarper(rules.eta_cutoff, device=str(scores.device))
        scores = eta(no_tokens, scores)
    return scores


def is_ended(row: Sequence) -> bool:
    """Whether the last token read ends `row`. An error of its rules is stored in `row.error` and ends it too."""
    try:
        return _is_ended(row)
    except Exception as error:
        row.error = row.error or error
        return True


def _is_ended(row: Sequence) -> bool:
    rules, tokens = row.options.rules, row.tokens[: len(row.logprobs)]
    if any(tuple(tokens[-len(stop) :]) == stop for stop in rules.stop_sequences):
        return True
    if rules.stop_strings and _ends_with_string(rules.tokenizer, rules.stop_strings, row.prompt.tokens, tokens):
        return True
    if rules.guide is None:
        return False
    if row.processors is None:  # drawn elsewhere: this process does not hold the last stage
        row.processors = build_row_processors(row.options, len(row.prompt.tokens), torch.device("cpu"))
    return row.processors.guide.is_complete(tokens)


def _ends_with_string(tokenizer: Any, strings: tuple[str, ...], prompt: list[int], tokens: list[int]) -> bool:
    """Whether the last token completes a string, which may begin in the prompt; transformers' rule.

    transformers knows the bytes of tokens for backends of `tokenizers`; for others, non-ASCII strings are searched for
    in the decoded text.
    """
    longest = max(len(string.encode()) for string in strings)  # tokens: one may be a single byte
    last = (prompt[-longest:] + tokens[-longest:])[-longest:]
    criteria = _criteria(tokenizer, strings)
    if criteria is not None and bool(criteria(torch.tensor([last]), None)[0]):
        return True
    wide = [string for string in strings if not string.isascii()]
    if not wide or not tokens:
        return False
    text, before = (tokenizer.decode(part, skip_special_tokens=False) for part in (last, last[:-1]))
    return any(text.count(string) > before.count(string) for string in wide)


@lru_cache(maxsize=32)
def _criteria(tokenizer: Any, strings: tuple[str, ...]) -> StopStringCriteria | None:
    """Returns transformers' criteria; None if it finds no token that contains part of a non-ASCII string."""
    try:
        return StopStringCriteria(tokenizer, list(strings))
    except ValueError:
        if all(string.isascii() for string in strings):
            raise
        return None


def num_before_stop(row: Sequence) -> int:
    """Number of tokens of a finished `row` that contain no part of the stop sequence or string that ended it."""
    rules, tokens = row.options.rules, row.tokens
    if row.finish_reason != "stop":
        return len(tokens)
    stops = [stop for stop in rules.stop_sequences if tuple(tokens[-len(stop) :]) == stop]
    if stops:
        return len(tokens) - max(map(len, stops))
    if not rules.stop_strings or (tokens and tokens[-1] in row.options.eos_token_ids):
        return len(tokens)

    def text(count: int) -> str:
        return rules.tokenizer.decode(tokens[:count], skip_special_tokens=False)

    found, count = first_stop(text(len(tokens)), rules.stop_strings), len(tokens)
    end = 0 if found is None else found[0]  # it began in the prompt
    while count > 0 and len(text(count)) > end:
        count -= 1
    return count


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
    supports: torch.Tensor | None = None
    """`[S, B]` uint8 of `pack_support`: what each token was drawn from; None if no row requests it."""


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
        self._has_supports = any(rule.record_supports for rule in rules)
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
        final = self._drawn_from(adjusted, scores)
        reported = self._reported(logits, final)
        measure = token_logprobs if self.is_exact else sampled_logprobs
        supports = pack_support(final) if self._has_supports else None
        return DrawnRows(tokens, measure(reported, tokens), ends, self._tops(reported), supports)

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

    def _drawn_from(self, adjusted: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns `adjusted [S, V]` with the filtered `scores [n, V]` of the sampled rows."""
        rows = self.options.sampled
        if rows is None or len(rows) == len(adjusted):
            return adjusted if rows is None else scores
        return adjusted.index_copy(0, rows, scores)

    def _reported(self, logits: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
        """Returns the scores `[S, V]` whose log-softmax is reported; `final` are those that were drawn from."""
        reported = logits if self.options.temperature is None else logits / self.options.temperature
        if self._raw is not None:
            reported = reported.index_copy(0, self._raw, logits[self._raw])
        if self._processed is not None:
            reported = reported.index_copy(0, self._processed, final[self._processed])
        return reported

    def _tops(self, reported: torch.Tensor) -> torch.Tensor | None:
        if self._num_tops == 0:
            return None
        values, ids = reported.log_softmax(-1).topk(self._num_tops, dim=-1)
        return torch.stack((ids.double(), values.double()))


def _with_row(scores: torch.Tensor, row: int, changed: torch.Tensor | None) -> torch.Tensor:
    return scores if changed is None else torch.cat((scores[:row], changed, scores[row + 1 :]))


def send_to_host(
    results: torch.Tensor,
    tops: torch.Tensor | None = None,
    supports: torch.Tensor | None = None,
    routes: torch.Tensor | None = None,
) -> Draw:
    """Returns a Draw of `results [3, S]` fp64, `tops [2, S, k]`, `supports [S, B]` and `routes [S, L, k]`.

    The device may overwrite the results and routes at once.
    """

    def drawn(
        values: torch.Tensor, tops: torch.Tensor | None, supports: torch.Tensor | None, routes: torch.Tensor | None
    ) -> Drawn:
        tokens, logprobs, ends = values.numpy()
        likeliest = None
        if tops is not None:
            ids, of_ids = tops
            pairs = zip(ids.long().tolist(), of_ids.tolist(), strict=True)
            likeliest = [list(zip(*row, strict=True)) for row in pairs]
        records = None if supports is None else read_records(supports.numpy())
        return Drawn(
            tokens.astype(np.int64).tolist(), logprobs.tolist(), ends.nonzero()[0].tolist(), likeliest, records, routes
        )

    if not results.is_cuda:
        copied, copied_routes = results.clone(), None if routes is None else routes.clone()
        return Draw(lambda: drawn(copied, tops, supports, copied_routes))
    sent = to_pinned(results)
    rest = [None if part is None else to_pinned(part) for part in (tops, supports, routes)]
    event = record_event(results.device)

    def read() -> Drawn:
        event.synchronize()
        return drawn(sent, *rest)

    return Draw(read)


def to_pinned(values: torch.Tensor) -> torch.Tensor:
    """Returns pinned host memory that holds `values` once the device has executed the copy."""
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values, non_blocking=True)


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
        tops = None if drawn.tops is None else drawn.tops[:, places]
        supports = None if drawn.supports is None else drawn.supports[places]
        return send_to_host(results, tops, supports).read()

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
