"""Sampling row by row: `SampleOp` for rows that have their own options each.

Options are tensors with one value per row, so that rows with different options take as many operations as equal ones. A
row's result depends only on its own logits and options: on a CPU tokens and log-probabilities have the bits of
`SampleOp.reference` with the row's options for all rows.

S rows, n of them sampled, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hybrid_engine.ops.sample import (
    SamplingOptions,
    draw_rows,
    first_largest,
    keep_from,
    kth_largest_by_row,
    nucleus_threshold,
    penalize_repetition,
)


class RowValues(NamedTuple):
    """Values of an option for the rows that use it: `values [m, 1]` for `rows [m]`, int64."""

    rows: torch.Tensor
    values: torch.Tensor


class EarlyEnds(NamedTuple):
    """End-of-sequence tokens that are not allowed yet, `[m]` int64 each."""

    rows: torch.Tensor
    tokens: torch.Tensor
    least: torch.Tensor
    """Number of draws before which the row may not draw the token."""


@dataclass(frozen=True)
class RowSamplingOptions:
    """The sampling options of S rows on their device; None means off for every row."""

    sampled: torch.Tensor | None
    """`[n]` int64: the rows that are sampled; the others take their likeliest token."""
    temperature: torch.Tensor | None
    """`[S, 1]` fp32; 1 for rows that are not sampled."""
    top_k: RowValues | None
    """Row numbers count only sampled rows, here and in the filters below."""
    top_p: RowValues | None
    log_min_p: RowValues | None
    repetition_penalty: torch.Tensor | None
    """`[S, 1]` fp32; 1 for rows without a penalty."""
    early_ends: EarlyEnds | None
    ends: torch.Tensor
    """`[S, e]` int64: tokens that end each row, padded with -1."""


def build_row_options(options: list[SamplingOptions], vocab: int, device: torch.device) -> RowSamplingOptions:
    """Tensors of `options`, one entry per row in order, for logits `[S, vocab]` on `device`."""
    sampled = [row for row, option in enumerate(options) if option.do_sample]
    drawn = [options[row] for row in sampled]

    def values(numbers: list[float], is_on: list[bool], dtype: torch.dtype = torch.float32) -> RowValues | None:
        rows = [row for row, on in enumerate(is_on) if on]
        if not rows:
            return None
        kept = torch.tensor([[numbers[row]] for row in rows], dtype=dtype, device=device)
        return RowValues(torch.tensor(rows, device=device), kept)

    def column(numbers: list[float]) -> torch.Tensor | None:
        if all(number == 1.0 for number in numbers):
            return None
        return torch.tensor(numbers, dtype=torch.float32, device=device)[:, None]

    width = max((len(option.eos_token_ids) for option in options), default=0)
    ends = [[*option.eos_token_ids, *[-1] * (width - len(option.eos_token_ids))] for option in options]
    return RowSamplingOptions(
        sampled=torch.tensor(sampled, device=device) if sampled else None,
        temperature=column([float(option.temperature) if option.do_sample else 1.0 for option in options]),
        top_k=values([o.top_k for o in drawn], [0 < o.top_k < vocab for o in drawn], torch.int64),
        top_p=values([o.top_p for o in drawn], [o.top_p < 1.0 for o in drawn]),
        log_min_p=values([math.log(o.min_p or 1.0) for o in drawn], [o.min_p > 0.0 for o in drawn]),
        repetition_penalty=column([float(option.repetition_penalty) for option in options]),
        early_ends=_early_ends(options, device),
        ends=torch.tensor(ends, dtype=torch.int64, device=device).view(len(options), width),
    )


def _early_ends(options: list[SamplingOptions], device: torch.device) -> EarlyEnds | None:
    cells = [
        (row, token, option.min_new_tokens)
        for row, option in enumerate(options)
        if option.min_new_tokens > 0
        for token in option.eos_token_ids
    ]
    return EarlyEnds(*torch.tensor(cells, dtype=torch.int64, device=device).unbind(1)) if cells else None


def adjust_rows(
    logits: torch.Tensor,
    options: RowSamplingOptions,
    draws: torch.Tensor,
    seen: torch.Tensor | None,
    penalties: torch.Tensor | None = None,
) -> torch.Tensor:
    """The logits that are drawn from, before temperature and filters; `logits [S, V]` fp32 are not modified.

    Args:
        draws: `[S]` int64, number of tokens that each row has drawn so far.
        seen: `[S, V]` bool, tokens for the repetition penalty; unused without one.
        penalties: `[S, V]` fp32, subtracted after the repetition penalty.
    """
    if options.repetition_penalty is not None:
        assert seen is not None
        logits = penalize_repetition(logits, seen, options.repetition_penalty)
    if penalties is not None:
        logits = logits - penalties
    if options.early_ends is None:
        return logits
    rows, tokens, least = options.early_ends
    kept = logits[rows, tokens].masked_fill(draws[rows] < least, float("-inf"))
    return logits.index_put((rows, tokens), kept)


def count_penalties(
    counts: torch.Tensor, presence: torch.Tensor | None, frequency: torch.Tensor | None
) -> torch.Tensor:
    """`[S, V]` fp32: OpenAI's penalties, frequency * count + presence * (count > 0), to be subtracted.

    `counts [S, V]` are of the tokens of each response; `presence` and `frequency` are `[S, 1]` fp32, or None. Source:
    OpenAI's API reference, "Frequency and presence penalties".
    """
    penalties = torch.zeros(counts.shape, dtype=torch.float32, device=counts.device)
    if frequency is not None:
        penalties = penalties + frequency * counts
    if presence is not None:
        penalties = penalties + presence * (counts > 0)
    return penalties


def filter_rows(adjusted: torch.Tensor, options: RowSamplingOptions) -> torch.Tensor:
    """`[n, V]`: the filtered logits of the sampled rows of `adjusted [S, V]`; -inf for excluded tokens."""
    if options.sampled is None:
        return adjusted[:0]
    logits = adjusted if options.temperature is None else adjusted / options.temperature
    if len(options.sampled) < len(adjusted):
        logits = logits[options.sampled]
    if options.top_k is not None:
        rows, top_k = options.top_k
        logits = _keep_rows_from(rows, kth_largest_by_row(logits[rows], top_k), logits)
    if options.top_p is not None:
        rows, top_p = options.top_p
        logits = _keep_rows_from(rows, nucleus_threshold(logits[rows], top_p), logits)
    if options.log_min_p is not None:
        rows, log_min_p = options.log_min_p
        logits = _keep_rows_from(rows, logits[rows].amax(-1, keepdim=True) + log_min_p, logits)
    return logits


def _keep_rows_from(rows: torch.Tensor, threshold: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """-inf for values below `threshold [m, 1]` in `rows [m]` of `logits`."""
    return keep_from(torch.full_like(logits[:, :1], -math.inf).index_copy_(0, rows, threshold), logits)


def pick_rows(
    adjusted: torch.Tensor, scores: torch.Tensor, options: RowSamplingOptions, keys: torch.Tensor, draws: torch.Tensor
) -> torch.Tensor:
    """`[S]` int64: a token drawn from `scores [n, V]` for sampled rows, the largest of `adjusted [S, V]` for others.

    `keys` and `draws` seed the noise, `[S]` int64.
    """
    rows = options.sampled
    if rows is None:
        return first_largest(adjusted)
    is_mixed = len(rows) < len(adjusted)
    if is_mixed:
        keys, draws = keys[rows], draws[rows]
    tokens = draw_rows(scores, keys, draws)
    return first_largest(adjusted).index_copy_(0, rows, tokens) if is_mixed else tokens
