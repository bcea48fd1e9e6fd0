"""Packs sequences into rows of a forward pass without padding: one after another, with positions that restart at 0.

Along spans (`spans.py`), attention is separate per sequence, and the answers to a prompt share all of its tokens but
the last: each answer has its own copy of that one, from which its first token is predicted. For other attention
implementations transformers keeps the sequences apart: if no mask is given, it finds them by positions that restart
(`masking_utils.find_packed_sequence_indices`; flash attention does the same in a single row). `packable.py` tests for
which models that is exact.

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

from hybrid_engine.containers.device import send_to_device
from hybrid_engine.rlhf.batches.spans import Span, Spans


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


class Prompt(NamedTuple):
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


class Packed(NamedTuple):
    """Inputs of a model for packed sequences, and the place of each token in them."""

    input_ids: torch.Tensor  # [R, W]
    position_ids: torch.Tensor  # [R, W]; 0 at every unused column, which begins a sequence of its own
    places: torch.Tensor  # [B, C]: where each token lies in the flattened rows; 0 for padding
    spans: Spans | None = None
    places_on_host: torch.Tensor | None = None  # `places` in host memory, if `places` is on a device

    def to(self, device: torch.device) -> "Packed":
        """Copies tensors that were packed on the host to `device`, without waiting for the copy."""
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
        # An unused mask whose shape transformers takes as complete; without it, it would make one of [N, N].
        nothing = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.input_ids.device)
        return inputs | {"spans": self.spans, "attention_mask": nothing}

    def gather(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`values [R, W]` of the last T columns of the padded batch, where `mask [B, T]` is True; 0 elsewhere."""
        places = self.places[:, self.places.shape[1] - mask.shape[1] :]
        return torch.where(mask, values.flatten()[places], 0.0)

    def scatter(self, mask: torch.Tensor) -> torch.Tensor:
        """`[R, W]` bool: True at the places of the last T columns of the padded batch where `mask [B, T]` is True.

        Mask and result are on the host.
        """
        places = self.places if self.places_on_host is None else self.places_on_host
        found = torch.zeros(self.input_ids.numel(), dtype=torch.bool)
        found[places[:, places.shape[1] - mask.shape[1] :][mask]] = True
        return found.view(self.input_ids.shape)


def prompts_of(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[Prompt]:
    """The prompts in `input_ids [B, P]`, padded on the left."""
    lengths = attention_mask.sum(dim=1).tolist()
    rows = torch.where(attention_mask.bool(), input_ids, 0).cpu().numpy()
    return [Prompt((length, row.tobytes()), length) for length, row in zip(lengths, rows, strict=True)]


def pack(input_ids: torch.Tensor, attention_mask: torch.Tensor, layout: Layout, prompt_columns: int = 0) -> Packed:
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
    return Packed(packed_ids.view(num_rows, -1), packed_positions.view(num_rows, -1), places, along)


def _starts(rows: list[list[int]], lengths: list[int], width: int) -> list[int]:
    """The start of each sequence in the flattened rows."""
    starts = [0] * len(lengths)
    for number, row in enumerate(rows):
        place = number * width
        for index in row:
            starts[index], place = place, place + lengths[index]
    return starts


def lay_out_spans(lengths: list[int], prompts: list[Prompt]) -> list[Span]:
    """A span for each sequence, then one for each prompt that several of them share, without its last token."""
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
