"""Sequences in rows of a forward pass without padding: their tokens behind each other, positions beginning anew.

Attention is kept apart by transformers, which finds the sequences of a row by positions that begin anew where no mask
is given (`masking_utils.find_packed_sequence_indices`; flash attention by the same in a single row). Which models that
is exact for is tried, not assumed: `packable.py`.

B sequences, C columns of the padded batch, R packed rows, W columns of these.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn


class Layout(Enum):
    """How the sequences of a forward pass lie in it."""

    PADDED = "padded"
    ROWS = "rows"
    """In rows as wide as the longest sequence: a mask of attention over one row of all would cost its square."""
    ONE_ROW = "one row"
    """For flash attention, which goes along sequences."""

    def num_cells(self, lengths: Sequence[int]) -> int:
        """Tokens and padding of a forward pass over sequences of these lengths, the longest first."""
        if self is Layout.ONE_ROW:
            return sum(lengths)
        num_rows = len(lengths) if self is Layout.PADDED else len(fit_rows(lengths))
        return num_rows * max(lengths, default=0)


_layouts: WeakKeyDictionary[nn.Module, Layout] = WeakKeyDictionary()


def layout_of(model: nn.Module) -> Layout:
    """How passes of a model, or of the model of an engine, are laid out: padded unless `set_layout` said otherwise."""
    return _layouts.get(getattr(model, "module", model), Layout.PADDED)


def set_layout(model: nn.Module, layout: Layout) -> None:
    """From now on passes of `model`, or of the model of an engine, are laid out so."""
    _layouts[getattr(model, "module", model)] = layout


def fit_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of `lengths` in rows as wide as the longest, each in the first row with room; the longest come first."""
    width, rows, room = max(lengths, default=0), list[list[int]](), list[int]()
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        row = next((row for row, left in enumerate(room) if left >= lengths[index]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


class Packed(NamedTuple):
    """What a model is given, and where everything is in it."""

    input_ids: torch.Tensor  # [R, W]
    position_ids: torch.Tensor  # [R, W]; 0 at every column that is left over, which begins a sequence of its own
    places: torch.Tensor  # [B, C]: where each token lies in the flattened rows; 0 for padding

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments of the model's forward."""
        return {"input_ids": self.input_ids, "position_ids": self.position_ids}

    def gather(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`values [R, W]` of the last T columns of the padded batch, where `mask [B, T]` is True; 0 elsewhere."""
        places = self.places[:, self.places.shape[1] - mask.shape[1] :]
        return torch.zeros_like(mask, dtype=values.dtype).masked_scatter(mask, values.flatten()[places[mask]])

    def scatter(self, mask: torch.Tensor) -> torch.Tensor:
        """`[R, W]` bool: True at the places of the last T columns of the padded batch where `mask [B, T]` is."""
        found = torch.zeros(self.input_ids.numel(), dtype=torch.bool, device=mask.device)
        found[self.places[:, self.places.shape[1] - mask.shape[1] :][mask]] = True
        return found.view_as(self.input_ids)


def pack(input_ids: torch.Tensor, attention_mask: torch.Tensor, layout: Layout) -> Packed:
    """Sequences `[B, C]`, whose tokens `attention_mask` marks without a gap between them, behind each other."""
    is_token = attention_mask.bool()
    lengths = attention_mask.sum(dim=1).tolist()
    rows = [list(range(len(lengths)))] if layout is Layout.ONE_ROW else fit_rows(lengths)
    width = sum(lengths) if layout is Layout.ONE_ROW else max(lengths)
    starts = [0] * len(lengths)
    for number, row in enumerate(rows):
        place = number * width
        for index in row:
            starts[index], place = place, place + lengths[index]
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    first = torch.tensor(starts, device=input_ids.device)[:, None]
    places = torch.where(is_token, first + positions, 0)
    packed_ids = input_ids.new_zeros(len(rows) * width)
    packed_positions = torch.zeros_like(packed_ids)
    packed_ids[places[is_token]] = input_ids[is_token]
    packed_positions[places[is_token]] = positions[is_token].to(packed_positions.dtype)
    return Packed(packed_ids.view(-1, width), packed_positions.view(-1, width), places)
