"""Rules as transformers' own logits processors, in its order, for one row or for rows that stay in step.

Repetition penalty, early ends and what works on single tokens is not here: `rows.py` does that for all rows at once,
between the two lists.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from transformers.generation import logits_process as transformers_logits
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.generation.sampling.guides import GuidedTokens


def processors_before(options: GenerationOptions) -> LogitsProcessorList:
    """What comes before the penalties."""
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
    """What comes between penalties and temperature; `early_ends` stand where transformers forbids those."""
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
    """The user's processors among the `defaults`: of a default's type they take its place, and others come last.

    Source: transformers, `GenerationMixin._merge_criteria_processor_list`.
    """
    merged = [next((own for own in given if type(own) is type(default)), default) for default in defaults]
    for own in given:
        if own not in merged:
            merged.append(own)
    return merged


class RowProcessors(NamedTuple):
    """The processors of one row; `guide` is among those of `after`."""

    before: LogitsProcessorList
    after: LogitsProcessorList
    guide: GuidedTokens | None


def build_row_processors(options: GenerationOptions, prompt_length: int, device: torch.device) -> RowProcessors:
    """The processors of a row whose prompt has `prompt_length` tokens, made of its options."""
    after = processors_after(options, prompt_length, device)
    guides = [processor for processor in after if isinstance(processor, GuidedTokens)]
    return RowProcessors(processors_before(options), after, guides[0] if guides else None)


def warp(scores: torch.Tensor, options: GenerationOptions) -> torch.Tensor:
    """`scores [m, V]` with the filters of rows that have these options which `sample_rows.py` has not."""
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
