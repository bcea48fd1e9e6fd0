"""Sequences in rows of a forward pass without padding: their tokens behind each other, positions beginning anew.

Attention is kept apart along spans (`spans.py`), and then the answers to a prompt share its tokens, all but the last:
each answer has a copy of that before it, from which its first token is predicted. Where a model's attention is another,
transformers keeps the sequences apart, which it finds by positions that begin anew where no mask is given
(`masking_utils.find_packed_sequence_indices`; flash attention by the same in a single row). Which models that is exact
for is tried, not assumed: `packable.py`.

B sequences, C columns of the padded batch, R packed rows, W columns of these.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Sequence
from enum import Enum
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hybrid_engine.containers.streams import send_to_device
from hybrid_engine.rlhf.batches.spans import Span, Spans


class Layout(Enum):
    """How the sequences of a forward pass lie in it."""

    PADDED = "padded"
    ROWS = "rows"
    """In rows as wide as the longest sequence: a mask of attention over one row of all would cost its square."""
    ONE_ROW = "one row"
    """For flash attention, which goes along sequences."""
    SPANS = "spans"
    """In one row, where attention goes along spans; prompts are shared."""

    @property
    def is_one_row(self) -> bool:
        """Whether the sequences lie in one row, and nothing is padded."""
        return self in (Layout.ONE_ROW, Layout.SPANS)

    def num_cells(self, lengths: Sequence[int]) -> int:
        """Tokens and padding of a forward pass over sequences of these lengths, the longest first."""
        if self.is_one_row:
            return sum(lengths)
        num_rows = len(lengths) if self is Layout.PADDED else len(fit_rows(lengths))
        return num_rows * max(lengths, default=0)


class Prompt(NamedTuple):
    """What sequences begin with and may share."""

    key: Hashable
    """Equal where prompts are."""
    length: int

    def cells_spared(self, num_sequences: int) -> int:
        """By how many cells fewer so many sequences with this prompt lie in a pass along spans."""
        return max(0, num_sequences - 1) * max(0, self.length - 1)


_layouts: WeakKeyDictionary[nn.Module, Layout] = WeakKeyDictionary()


def layout_of(model: nn.Module) -> Layout:
    """How passes of a model, or of the model of an engine, are laid out: padded unless `set_layout` said otherwise."""
    return _layouts.get(getattr(model, "module", model), Layout.PADDED)


def set_layout(model: nn.Module, layout: Layout) -> None:
    """From now on passes of `model`, or of the model of an engine, are laid out so."""
    _layouts[getattr(model, "module", model)] = layout


def fit_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of `lengths` in rows as wide as the longest, each where least room is left; the longest come first."""
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


class Packed(NamedTuple):
    """What a model is given, and where everything is in it."""

    input_ids: torch.Tensor  # [R, W]
    position_ids: torch.Tensor  # [R, W]; 0 at every column that is left over, which begins a sequence of its own
    places: torch.Tensor  # [B, C]: where each token lies in the flattened rows; 0 for padding
    spans: Spans | None = None
    places_on_host: torch.Tensor | None = None  # the same as `places`, where that lies on a device

    def to(self, device: torch.device) -> "Packed":
        """What was packed on the host, on `device`, without waiting for it."""
        return Packed(
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
        # A mask that nobody reads, of a shape that transformers takes for complete: it would make one of [N, N].
        nothing = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.input_ids.device)
        return inputs | {"spans": self.spans, "attention_mask": nothing}

    def gather(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`values [R, W]` of the last T columns of the padded batch, where `mask [B, T]` is True; 0 elsewhere."""
        places = self.places[:, self.places.shape[1] - mask.shape[1] :]
        return torch.where(mask, values.flatten()[places], 0.0)

    def scatter(self, mask: torch.Tensor) -> torch.Tensor:
        """`[R, W]` bool: True at the places of the last T columns of the padded batch where `mask [B, T]` is.

        Mask and result lie on the host.
        """
        places = self.places if self.places_on_host is None else self.places_on_host
        found = torch.zeros(self.input_ids.numel(), dtype=torch.bool)
        found[places[:, places.shape[1] - mask.shape[1] :][mask]] = True
        return found.view(self.input_ids.shape)


def prompts_of(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[Prompt]:
    """The prompts `[B, P]`, padded on the left."""
    lengths = attention_mask.sum(dim=1).tolist()
    rows = torch.where(attention_mask.bool(), input_ids, 0).cpu().numpy()
    return [Prompt((length, row.tobytes()), length) for length, row in zip(lengths, rows, strict=True)]


def pack(input_ids: torch.Tensor, attention_mask: torch.Tensor, layout: Layout, prompt_columns: int = 0) -> Packed:
    """Sequences `[B, C]` of the host, whose tokens `attention_mask` marks without a gap, behind each other; see `to`.

    `prompt_columns`: the first columns, which sequences may share where the layout is along spans; 0: nothing.
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
    return Packed(packed_ids.view(num_rows, -1), packed_positions.view(num_rows, -1), places, along)


def _starts(rows: list[list[int]], lengths: list[int], width: int) -> list[int]:
    """Where each sequence begins in the flattened rows."""
    starts = [0] * len(lengths)
    for number, row in enumerate(rows):
        place = number * width
        for index in row:
            starts[index], place = place, place + lengths[index]
    return starts


def lay_out_spans(lengths: list[int], prompts: list[Prompt]) -> list[Span]:
    """A span for each sequence, then one for each prompt that several of them share, but for its last token."""
    sharing = defaultdict[Prompt, list[int]](list)
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
