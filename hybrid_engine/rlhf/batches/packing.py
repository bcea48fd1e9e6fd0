"""Packs sequences into rows of a forward pass without padding: one after another, with positions that restart at 0.

Along spans, attention is separate per sequence, and the answers to a prompt share all of its tokens but
the last: each answer has its own copy of that one, from which its first token is predicted. For other attention
implementations transformers keeps the sequences apart: if no mask is given, it finds them by positions that restart
(`masking_utils.find_packed_sequence_indices`; flash attention does the same in a single row). `packable.py` tests for
which models that is exact.

B sequences, C columns of the padded batch, R packed rows, W columns of these.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

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
_masks = WeakTensorKeyDictionary()
"""Masks by queries of a bucket and dtype: made in the first layer of a pass, for all layers."""


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


class Layout(Enum):
    """The layout of the sequences in a forward pass."""

    PADDED = "padded"
    ROWS = "rows"
    """Rows as wide as the longest sequence: an attention mask over a single row would cost its square."""
    ONE_ROW = "one row"
    """One row for flash attention, which handles sequences separately."""
    SPANS = "spans"
    """One row, with attention along spans; prompts are shared."""

    @property
    def is_one_row(self) -> bool:
        """Whether the sequences lie in one row without padding."""
        return self in (Layout.ONE_ROW, Layout.SPANS)

    def num_cells(self, lengths: Sequence[int]) -> int:
        """Tokens and padding of a forward pass over sequences of these lengths, the longest first."""
        if self.is_one_row:
            return sum(lengths)
        num_rows = len(lengths) if self is Layout.PADDED else len(fit_rows(lengths))
        return num_rows * max(lengths, default=0)


class SharedPrompt(NamedTuple):
    """The beginning of a sequence, which other sequences may share."""

    key: Hashable
    """Equal if the prompts are equal."""
    length: int

    def cells_spared(self, num_sequences: int) -> int:
        """Cells that a pass along spans saves by sharing this prompt among `num_sequences` sequences."""
        return max(0, num_sequences - 1) * max(0, self.length - 1)


_layouts: WeakKeyDictionary[nn.Module, Layout] = WeakKeyDictionary()


def layout_of(model: nn.Module) -> Layout:
    """The layout of passes of a model, or of an engine's model: padded unless `set_layout` said otherwise."""
    return _layouts.get(getattr(model, "module", model), Layout.PADDED)


def set_layout(model: nn.Module, layout: Layout) -> None:
    """Sets the layout of passes of `model`, or of an engine's model, from now on."""
    _layouts[getattr(model, "module", model)] = layout


def fit_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of `lengths` in rows as wide as the longest, longest first: each goes where it leaves least room."""
    width, rows, open_rows = max(lengths, default=0), list[list[int]](), list[tuple[int, int]]()
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(open_rows, (lengths[index], 0))
        if place == len(open_rows):
            room, row = width, len(rows)
            rows.append([])
        else:
            room, row = open_rows.pop(place)
        rows[row].append(index)
        insort(open_rows, (room - lengths[index], row))
    return rows


class PackedRows(NamedTuple):
    """Inputs of a model for packed sequences, and the place of each token in them."""

    input_ids: torch.Tensor  # [R, W]
    position_ids: torch.Tensor  # [R, W]; 0 at every unused column, which begins a sequence of its own
    places: torch.Tensor  # [B, C]: where each token lies in the flattened rows; 0 for padding
    spans: Spans | None = None
    places_on_host: torch.Tensor | None = None  # `places` in host memory, if `places` is on a device

    def to(self, device: torch.device) -> "PackedRows":
        """Copies tensors that were packed on the host to `device`, without waiting for the copy."""
        return PackedRows(
            send_to_device(self.input_ids, device),
            send_to_device(self.position_ids, device),
            send_to_device(self.places, device),
            None if self.spans is None else self.spans.to(device),
            self.places,
        )

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments of the model's forward."""
        inputs: dict[str, Any] = {"input_ids": self.input_ids, "position_ids": self.position_ids}
        if self.spans is None:
            return inputs
        # An unused mask whose shape transformers takes as complete; without it, it would make one of [N, N].
        nothing = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.input_ids.device)
        return inputs | {"spans": self.spans, "attention_mask": nothing}

    def gather(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`values [R, W]` of the last T columns of the padded batch, where `mask [B, T]` is True; 0 elsewhere."""
        places = self.places[:, self.places.shape[1] - mask.shape[1] :]
        return torch.where(mask, values.flatten()[places], 0.0)

    def numbers(self, mask: torch.Tensor) -> torch.Tensor:
        """`[R, W]` int64: the number of each token among the True cells of `mask [B, T]`, in their order; -1 elsewhere.

        The mask is that of the last T columns of the padded batch. Mask and result are on the host.
        """
        places = self.places if self.places_on_host is None else self.places_on_host
        chosen = places[:, places.shape[1] - mask.shape[1] :][mask]
        found = torch.full((self.input_ids.numel(),), -1)
        found[chosen] = torch.arange(len(chosen))
        return found.view(self.input_ids.shape)


def prompts_of(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[SharedPrompt]:
    """The prompts in `input_ids [B, P]`, padded on the left."""
    lengths = attention_mask.sum(dim=1).tolist()
    rows = torch.where(attention_mask.bool(), input_ids, 0).cpu().numpy()
    return [SharedPrompt((length, row.tobytes()), length) for length, row in zip(lengths, rows, strict=True)]


def pack(input_ids: torch.Tensor, attention_mask: torch.Tensor, layout: Layout, prompt_columns: int = 0) -> PackedRows:
    """Packs sequences `[B, C]` on the host, whose tokens `attention_mask` marks without a gap; see `to`.

    `prompt_columns`: the number of leading columns that sequences may share if the layout is along spans; 0: none.
    """
    is_token = attention_mask.bool()
    lengths = attention_mask.sum(dim=1).tolist()
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    shared = [0] * len(lengths)
    spans: list[Span] = []
    if layout is Layout.SPANS:
        prompts = prompts_of(input_ids[:, :prompt_columns], attention_mask[:, :prompt_columns])
        spans = lay_out_spans(lengths, prompts)
        starts, shared, shared_starts = ([span[field] for span in spans[: len(lengths)]] for field in (0, 3, 2))
        num_rows, width = 1, sum(span.length for span in spans)
    else:
        rows = [list(range(len(lengths)))] if layout is Layout.ONE_ROW else fit_rows(lengths)
        num_rows, width = len(rows), sum(lengths) if layout is Layout.ONE_ROW else max(lengths)
        starts = _starts(rows, lengths, width)

    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values)[:, None]

    places = column(starts) + positions - column(shared)
    if any(shared):
        places = torch.where(positions < column(shared), column(shared_starts) + positions, places)
    places = torch.where(is_token, places, 0)
    packed_ids = input_ids.new_zeros(num_rows * width)
    packed_positions = torch.zeros_like(packed_ids)
    packed_ids[places[is_token]] = input_ids[is_token]
    packed_positions[places[is_token]] = positions[is_token].to(packed_positions.dtype)
    along = Spans.of(spans) if spans else None
    return PackedRows(packed_ids.view(num_rows, -1), packed_positions.view(num_rows, -1), places, along)


def _starts(rows: list[list[int]], lengths: list[int], width: int) -> list[int]:
    """The start of each sequence in the flattened rows."""
    starts = [0] * len(lengths)
    for number, row in enumerate(rows):
        place = number * width
        for index in row:
            starts[index], place = place, place + lengths[index]
    return starts


def lay_out_spans(lengths: list[int], prompts: list[SharedPrompt]) -> list[Span]:
    """A span for each sequence, then one for each prompt that several of them share, without its last token."""
    sharing = defaultdict[SharedPrompt, list[int]](list)
    for index, prompt in enumerate(prompts):
        sharing[prompt].append(index)
    spans, common, place = [Span(0, 0)] * len(lengths), list[Span](), 0
    for prompt, indices in sharing.items():
        num_shared = prompt.length - 1 if prompt.cells_spared(len(indices)) else 0
        prefix_start = place
        if num_shared:
            common.append(Span(place, num_shared))
            place += num_shared
        for index in indices:
            spans[index] = Span(place, lengths[index] - num_shared, prefix_start if num_shared else 0, num_shared)
            place += lengths[index] - num_shared
    return spans + common
