"""Attention along spans of one long row: of sequences without padding, and of answers behind a prompt read once.

A span is a run of cells of the row in which every token sees those before it; it may also see all of a prefix, another
span. So a prompt stands in the row once, its answers behind it see it and themselves, and nothing else of a pass is
computed for padding or for copies of a prompt. Attention itself is a batch of spans alike in length, padded.

transformers' models call it by its name `ATTENTION`, for models that call their attention through
`ALL_ATTENTION_FUNCTIONS` and hand it the arguments of their forward; without `spans` it is "sdpa".

N cells, A spans of a bucket, S cells of the longest of these, K of it with the longest prefix; H heads, D their size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "hybrid_engine_spans"
ALIKE = 0.6
"""Spans as long as this share of a bucket's longest, or longer, are in that bucket."""


class Span(NamedTuple):
    """Cells `start` to `start + length`, which see those of the prefix too: `prefix_length` from `prefix_start`."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


class Bucket(NamedTuple):
    """Spans that attention computes as a batch."""

    queries: torch.Tensor  # [A * S]: cells; 0 for padding
    keys: torch.Tensor  # [A * K]: cells of the prefixes, then of the spans; 0 for padding
    mask: torch.Tensor | None  # [A, 1, S, K] bool: what sees what; None: what is before it
    num_spans: int


class Spans(NamedTuple):
    """All spans of a row, which cover it without overlapping."""

    buckets: tuple[Bucket, ...]
    order: torch.Tensor  # [N]: where in the buckets' queries, one after another, each cell is

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> "Spans":
        """The spans of a row, in buckets."""
        buckets, order, first = [], torch.zeros(sum(span.length for span in spans), dtype=torch.int64), 0
        for alike in _alike(spans):
            bucket, is_cell = _bucket(alike)
            order[bucket.queries[is_cell]] = first + is_cell.nonzero().squeeze(1)
            mask = None if bucket.mask is None else bucket.mask.to(device)
            buckets.append(Bucket(bucket.queries.to(device), bucket.keys.to(device), mask, len(alike)))
            first += len(bucket.queries)
        return cls(tuple(buckets), order.to(device))


def _alike(spans: Sequence[Span]) -> list[list[Span]]:
    buckets: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.prefix_length > 0, -span.length)):
        longest = buckets[-1][0] if buckets else None
        if (
            longest is None
            or bool(longest.prefix_length) != bool(span.prefix_length)
            or span.length < ALIKE * longest.length
        ):
            buckets.append([span])
        else:
            buckets[-1].append(span)
    return buckets


def _bucket(spans: Sequence[Span]) -> tuple[Bucket, torch.Tensor]:
    """The bucket of `spans`, and `[A * S]` bool: which of its queries are cells."""
    starts, lengths, prefix_starts, prefix_lengths = torch.tensor(spans).T[:, :, None]  # [A, 1] each
    steps = torch.arange(int(lengths.max()))  # [S]
    is_cell = steps < lengths  # [A, S]
    queries = torch.where(is_cell, starts + steps, 0)
    prefix_steps = torch.arange(int(prefix_lengths.max()))
    in_prefix = prefix_steps < prefix_lengths  # [A, P]
    keys = torch.cat([torch.where(in_prefix, prefix_starts + prefix_steps, 0), queries], dim=1)
    mask = None
    if len(prefix_steps):
        # Padding lies behind every cell, which therefore does not see it.
        before = (steps <= steps[:, None]).expand(len(spans), -1, -1)  # [A, S, S]
        seen = in_prefix[:, None].expand(-1, len(steps), -1)  # [A, S, P]
        mask = torch.cat([seen, before], dim=2)[:, None]
    return Bucket(queries.flatten(), keys.flatten(), mask, len(spans)), is_cell.flatten()


def attend_along_spans(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    spans: Spans | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' interface of an attention function: query `[1, H, N, D]`; key and value alike, of fewer heads.

    Returns:
        `[1, N, H, D]`, and None for the weights.

    Raises:
        NotImplementedError: the model's attention is more than a scaled product of what `spans` lets see each other.
    """
    if spans is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    given = [name for name in ("softcap", "s_aux", "position_bias", "sliding_window") if kwargs.get(name) is not None]
    if given:
        raise NotImplementedError(f"attention along spans has no {', '.join(given)}")
    by_cell = [part[0].transpose(0, 1) for part in (query, key, value)]  # [N, heads, D] each
    found = []
    for bucket in spans.buckets:
        cells = (bucket.queries, bucket.keys, bucket.keys)
        own, keys, values = (
            part.index_select(0, index).unflatten(0, (bucket.num_spans, -1)).transpose(1, 2)
            for part, index in zip(by_cell, cells, strict=True)
        )
        output = scaled_dot_product_attention(
            own,
            keys,
            values,
            attn_mask=bucket.mask,
            is_causal=bucket.mask is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        found.append(output.transpose(1, 2).flatten(0, 1))  # [A * S, H, D]
    return torch.cat(found).index_select(0, spans.order)[None], None


AttentionInterface.register(ATTENTION, attend_along_spans)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
