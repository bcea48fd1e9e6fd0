"""Attention along spans of one long row: sequences without padding, and answers that share a single copy of a prompt.

A span is a run of cells of the row in which every token attends to those before it; it may also attend to all of a
prefix, which is another span. So a prompt is in the row once, its answers attend to it and to themselves, and nothing
else of a pass is computed for padding or for copies of a prompt. Attention itself is a padded batch of lines of similar
length. A line is a span, or several short spans that follow one long prefix, whose keys and values are then copied once
for all of them.

transformers' models call it by its name `ATTENTION`, if they call attention through `ALL_ATTENTION_FUNCTIONS` and pass
on the arguments of their forward; without `spans` it is "sdpa".

N cells, A lines of a bucket, S cells of the longest of these, P of the longest prefix, K = P + S; H heads of dimension
D.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hybrid_engine.containers.device import send_to_device
from hybrid_engine.ops.softmax_context import attend_grouped, repeat_where_not_shared

ATTENTION = "hybrid_engine_spans"
MOST_SHARED = 256
"""Head dimension up to which transformers leaves the sharing of key/value heads to torch where there is no mask."""
ALIKE = 0.6
"""Lines at least this fraction of a bucket's longest join that bucket; the same holds for their keys."""
TOGETHER = 0.3
"""Approximate length of a line of several spans, as a fraction of their prefix's length. The spans do not attend to
each other, but those products are computed; longer lines cost more time for them than copies of the prefix do.
"""


class Span(NamedTuple):
    """Cells `start` to `start + length`, which also attend to the prefix: `prefix_length` cells from `prefix_start`."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


Line = list[Span]
"""Spans with the same prefix, or one span without a prefix."""


class Bucket(NamedTuple):
    """Lines that attention computes as one batch."""

    queries: torch.Tensor  # [A, S]: cells; 0 for padding
    keys: torch.Tensor  # [A, K]: cells of the prefix, then of the line; 0 for padding
    members: torch.Tensor  # [A, S]: the number of the span in its line that a cell belongs to; -1 for padding
    prefix_lengths: torch.Tensor | None  # [A]; None: there are no prefixes, and a line is a span


class Spans(NamedTuple):
    """All spans of a row, which cover it without overlap."""

    buckets: tuple[Bucket, ...]
    order: torch.Tensor  # [N]: the place of each cell in the buckets' queries, which follow one another

    @classmethod
    def of(cls, spans: Sequence[Span]) -> "Spans":
        """Sorts the spans of a row into buckets, on the host."""
        lines = _lines(spans)
        buckets = [
            _bucket(batch)
            for has_prefix in (False, True)
            for alike in _alike((line for line in lines if bool(line[0].prefix_length) == has_prefix), _num_queries)
            for batch in _alike(alike, _num_keys)
        ]
        order, first = torch.zeros(sum(span.length for span in spans), dtype=torch.int64), 0
        for bucket in buckets:
            is_cell = bucket.members.flatten() >= 0
            order[bucket.queries.flatten()[is_cell]] = first + is_cell.nonzero().squeeze(1)
            first += len(is_cell)
        return cls(tuple(buckets), order)

    def to(self, device: torch.device) -> "Spans":
        """Copies spans on the host to `device`, without waiting for the copy."""
        sent = (
            Bucket(*(part if part is None else send_to_device(part, device) for part in bucket))
            for bucket in self.buckets
        )
        return Spans(tuple(sent), send_to_device(self.order, device))


def count_copied(spans: Sequence[Span]) -> tuple[int, int]:
    """Cells of prefixes whose keys and values are copied, and pairs of queries and keys in masks; without padding."""
    lines = [line for line in _lines(spans) if line[0].prefix_length]
    pairs = (_num_queries(line) * _num_keys(line) for line in lines)
    return sum(line[0].prefix_length for line in lines), sum(pairs)


def _lines(spans: Sequence[Span]) -> list[Line]:
    """Puts the spans of each prefix on as few lines as possible, of about equal length."""
    behind = defaultdict[tuple[int, int], Line](list)
    lines: list[Line] = []
    for span in sorted(spans, key=lambda span: -span.length):
        if span.prefix_length:
            behind[span.prefix_start, span.prefix_length].append(span)
        else:
            lines.append([span])
    for (_, prefix_length), line in behind.items():
        most = max(1, int(TOGETHER * prefix_length))
        num_lines = min(len(line), -(-_num_queries(line) // most))
        lines += [line[number::num_lines] for number in range(num_lines)]
    return lines


def _num_queries(line: Line) -> int:
    return sum(span.length for span in line)


def _num_keys(line: Line) -> int:
    return line[0].prefix_length + _num_queries(line)


def _alike(lines: Iterable[Line], length: Callable[[Line], int]) -> list[list[Line]]:
    batches: list[list[Line]] = []
    for line in sorted(lines, key=length, reverse=True):
        if batches and length(line) >= ALIKE * length(batches[-1][0]):
            batches[-1].append(line)
        else:
            batches.append([line])
    return batches


def _bucket(lines: Sequence[Line]) -> Bucket:
    spans = [*chain.from_iterable(lines)]
    lengths, widths = torch.tensor([span.length for span in spans]), torch.tensor([*map(_num_queries, lines)])
    cells = _ranges(torch.tensor([span.start for span in spans]), lengths)
    places = torch.arange(len(lines)).repeat_interleave(widths), _ranges(torch.zeros_like(widths), widths)
    queries = torch.zeros(len(lines), int(widths.max()), dtype=torch.int64)
    members = torch.full_like(queries, -1)
    queries[places] = cells
    members[places] = torch.tensor([number for line in lines for number in range(len(line))]).repeat_interleave(lengths)
    if not lines[0][0].prefix_length:
        return Bucket(queries, queries, members, None)
    starts, prefix_lengths = torch.tensor([line[0][2:] for line in lines]).unbind(1)
    steps = torch.arange(int(prefix_lengths.max()))
    prefixes = torch.where(steps < prefix_lengths[:, None], starts[:, None] + steps, 0)
    return Bucket(queries, torch.cat([prefixes, queries], dim=1), members, prefix_lengths)


def _ranges(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Consecutive numbers: `lengths[i]` of them from `starts[i]` on, for each i in turn."""
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + (starts - before).repeat_interleave(lengths)


_masks = WeakTensorKeyDictionary()
"""Masks by queries of a bucket and dtype: made in the first layer of a pass, for all layers."""


def _mask_of(bucket: Bucket, dtype: torch.dtype) -> torch.Tensor | None:
    """`[A, 1, S, K]` of `dtype`: 0 where a query sees a key, -inf elsewhere; None means a causal mask."""
    if bucket.prefix_lengths is None:
        return None
    masks = _masks.setdefault(bucket.queries, {})
    if dtype not in masks:
        masks[dtype] = _make_mask(bucket.members, bucket.prefix_lengths, bucket.keys.shape[1], dtype)
    return masks[dtype]


def _make_mask(members: torch.Tensor, prefix_lengths: torch.Tensor, num_keys: int, dtype: torch.dtype) -> torch.Tensor:
    """Makes the mask of a bucket; padding sees the prefix and padding, so that no query sees nothing."""
    steps = torch.arange(members.shape[1], device=members.device)
    own = (members[:, :, None] == members[:, None]) & (steps <= steps[:, None])  # [A, S, S]
    in_prefix = torch.arange(num_keys - members.shape[1], device=members.device) < prefix_lengths[:, None]  # [A, P]
    seen = torch.cat([in_prefix[:, None].expand(-1, len(steps), -1), own], dim=2)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))[:, None]


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
    """Attention function with transformers' interface: query `[1, H, N, D]`; key and value alike, with fewer heads.

    Returns:
        `[1, N, H, D]`, and None for the weights.

    Raises:
        NotImplementedError: the model's attention is more than scaled dot products within `spans`.
    """
    if spans is None:
        if attention_mask is None and key.shape[-1] <= MOST_SHARED:
            key, value = repeat_where_not_shared(query, key, value, None)
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
            part.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
            for part, index in zip(by_cell, cells, strict=True)
        )
        mask = _mask_of(bucket, query.dtype)
        output = attend_grouped(own, keys, values, mask, is_causal=mask is None, scale=scaling, dropout=dropout)
        found.append(output.transpose(1, 2).flatten(0, 1))  # [A * S, H, D]
    return torch.cat(found).index_select(0, spans.order)[None], None


AttentionInterface.register(ATTENTION, attend_along_spans)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
