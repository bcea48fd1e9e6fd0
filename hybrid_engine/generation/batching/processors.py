"""Builds transformers' logits processors for rules, in its order, for one row or for rows in step.

`rows.py` applies repetition penalty, early ends and rules on single tokens to all rows at once, between the two lists.
This file also checks whether a row has ended.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from transformers import StopStringCriteria
from transformers.generation import logits_process as transformers_logits
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from hybrid_engine.generation.request.core import Sequence
from hybrid_engine.generation.request.detokenize import first_stop
from hybrid_engine.generation.request.guides import GuidedTokens
from hybrid_engine.generation.request.options import GenerationOptions


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


def is_ended(row: Sequence, vocab: int) -> bool:
    """Whether the last token read ends `row`. An error of its rules is stored in `row.error` and ends it too."""
    try:
        return _is_ended(row, vocab)
    except Exception as error:
        row.error = row.error or error
        return True


def _is_ended(row: Sequence, vocab: int) -> bool:
    rules, tokens = row.options.rules, row.tokens[: len(row.logprobs)]
    if any(tuple(tokens[-len(stop) :]) == stop for stop in rules.stop_sequences):
        return True
    if rules.stop_strings and _ends_with_string(rules.tokenizer, rules.stop_strings, row.prompt.tokens, tokens):
        return True
    if rules.guide is None:
        return False
    if row.processors is None:  # drawn elsewhere: this process does not hold the last stage
        row.processors = build_row_processors(row.options, len(row.prompt.tokens), torch.device("cpu"))
    return row.processors.guide.is_complete(tokens, vocab)


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
