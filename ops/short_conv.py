"""Causal depthwise convolution over packed sequences, with the last inputs of each sequence kept in a slot.

    y[t, c] = act(bias[c] + sum_j weight[c, j] x[t - W + 1 + j, c])          j from 0 to W - 1

x before the first token of a sequence is 0. It is the convolution of Mamba, gated delta nets and LFM2, W = 3 or 4
(`causal_conv1d_fn` and `causal_conv1d_update` of transformers). The next token needs the W - 1 inputs before it, which
are the state: `[num_slots, W - 1, C]` in the dtype of the input, the oldest first. transformers keeps W of them and
never reads the oldest. Sums are fp32, rounded to the dtype before the activation, as torch's operators round.

A chunk of a sequence goes on from its slot; a sequence that is fed from its first token on ignores what the slot holds.
A decode step moves 2 W S C elements and does 2 W S C operations. Kernels run one program for a tile of channels and, in
prefill, of tokens; the states are then written by a second kernel, after all programs have read them.

N packed tokens, R sequences, S decoded rows, C channels, W width of the kernel.
"""

from typing import NamedTuple

import torch

from hybrid_engine.ops import cpu_states
from hybrid_engine.ops.batch import Batch, DecodeBatch, MixedBatch, PrefillBatch, over_parts
from hybrid_engine.ops.dispatch import (
    Launch,
    check_tensor,
    kernel_or_reference,
    next_power_of_2,
    prepared,
    tl,
    triton,
    use_triton,
)
from hybrid_engine.ops.linears import ACTIVATIONS
from hybrid_engine.ops.linears_kernels import activate

TOKENS = 32  # of a program's tile
MAX_CHANNELS = 128  # of a program's tile


def conv_state_shape(num_channels: int, width: int) -> tuple[int, int]:
    """Shape of one sequence's state, `[W - 1, C]`."""
    return width - 1, num_channels


class ShortConvOp:
    """Callable `(input, weight, bias, states, batch) -> [N, C]`.

    Args:
        activation: a name in `linears.ACTIVATIONS`, applied to the result; None: none.
    """

    def __init__(self, activation: str | None = None):
        self.activation_name = activation
        self.activation = None if activation is None else ACTIVATIONS[activation]

    def __call__(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Convolves the batch's tokens and replaces the states of their sequences.

        Rows of `input` after those of the batch's tokens, of a prefill, are padding: their output is 0.

        Args:
            input: `[N, C]`, any strides.
            weight: `[C, W]`, dense rows, as `nn.Conv1d.weight.squeeze(1)`.
            bias: `[C]` or None.
            states: `[num_slots, W - 1, C]`, dense slots, in the dtype of the input.
            batch: its `state_slots` name a slot for each sequence; no two sequences share one.

        Raises:
            ValueError: a tensor that does not fit, or a batch without slots.
        """
        parts = over_parts(lambda rows, part: self(input[rows], weight, bias, states, part), len(input), batch)
        if parts is not None:
            return parts
        assert not isinstance(batch, MixedBatch)
        slots = slots_of(batch)
        if use_triton(input):
            return kernel_or_reference(self._launch, self.reference, input, weight, bias, states, batch)
        _check(input, weight, bias, states, slots)
        if cpu_states.can_convolve(input, weight, bias, states, slots):
            return cpu_states.short_conv(input, weight, bias, states, batch, self.activation_name)
        return self.reference(input, weight, bias, states, batch)

    def reference(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        batch: PrefillBatch | DecodeBatch,
    ) -> torch.Tensor:
        """The reference: the function of the kernels in plain torch."""
        slots, num_kept = slots_of(batch), weight.shape[1] - 1
        before = states[slots]
        if isinstance(batch, DecodeBatch):
            taken = torch.cat((before, input[:, None]), 1)  # [S, W, C]
            states[slots] = taken[:, 1:]
            output = _weigh([taken[:, j] for j in range(num_kept + 1)], weight, bias)
            return self._activate(output.to(input.dtype))
        before = before.masked_fill(batch.starts_anew[:, None, None], 0)
        pieces = zip(before, input.split(batch.lengths), strict=True)
        joined = torch.cat([part for pair in pieces for part in pair])  # each sequence after its state
        # Row i of the sums is of the inputs i to i + W - 1: the sums over the end of a sequence are left out.
        num_sums = len(joined) - num_kept
        sums = _weigh([joined[j : j + num_sums] for j in range(num_kept + 1)], weight, bias)
        ends = [end + num_kept * index for index, end in enumerate(_ends(batch.lengths), 1)]
        outputs = [sums[end - num_kept - size : end - num_kept] for end, size in zip(ends, batch.lengths, strict=True)]
        if num_kept:
            states[slots] = torch.stack([joined[end - num_kept : end] for end in ends])
        return self._activate(torch.cat(outputs).to(input.dtype))

    def _activate(self, output: torch.Tensor) -> torch.Tensor:
        return output if self.activation is None else self.activation(output)

    def _launch(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        batch: PrefillBatch | DecodeBatch,
    ) -> torch.Tensor:
        """The op by its kernels. Raises ValueError for a tensor that they cannot read."""
        slots, starts, anew, most = slots_of(batch), None, None, 1
        if isinstance(batch, PrefillBatch):
            starts, anew, most = batch.starts, batch.starts_anew, max(batch.lengths)
        launches = prepared(_prepare, self.activation_name, most, input, weight, bias, states, slots, starts, anew)
        output = input.new_empty(input.shape)
        rows = ConvRows(input, input.stride(0), input.stride(1), output, input.shape[1])
        sequences = ConvSequences(states, states.stride(0), slots, starts, anew)
        if launches.prefill is not None:
            launches.prefill(rows, weight, bias, sequences)
        launches.step(rows, weight, bias, sequences)
        return output


def slots_of(batch: PrefillBatch | DecodeBatch) -> torch.Tensor:
    """The slot of each sequence. Raises ValueError for a batch without slots."""
    if batch.state_slots is None:
        raise ValueError(f"the {type(batch).__name__} names no state slots; a layer with a state needs one a sequence")
    return batch.state_slots


def _check(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Raises ValueError for tensors that do not fit each other."""
    num_channels, width = weight.shape
    check_tensor("input", input, shape=(None, num_channels))
    check_tensor("weight", weight, like=input)
    if bias is not None:
        check_tensor("bias", bias, like=input, shape=(num_channels,), is_dense_last=True)
    check_tensor("states", states, like=input, shape=(None, *conv_state_shape(num_channels, width)))
    if len(states) and not states[0].is_contiguous():
        raise ValueError(f"states have strides {states.stride()}; expected dense slots")
    check_tensor("slots", slots, like=input, dtype=torch.int64, shape=(None,), is_dense_last=True)


def _ends(lengths: tuple[int, ...]) -> list[int]:
    """Where each packed sequence ends."""
    ends, end = [], 0
    for length in lengths:
        end += length
        ends.append(end)
    return ends


def _weigh(inputs: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The bias plus each of W inputs `[..., C]` times its column of the weight, in fp32 or wider."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    columns = weight.to(dtype).t()
    output = inputs[0].to(dtype) * columns[0] if bias is None else bias.to(dtype) + inputs[0] * columns[0]
    for input, column in zip(inputs[1:], columns[1:], strict=True):
        output = output.addcmul_(input.to(dtype), column)
    return output


class ConvLaunches(NamedTuple):
    """The launch over tiles of tokens, in prefill, and the one that writes states, and in decode the output."""

    prefill: Launch | None
    step: Launch


class ConvRows(NamedTuple):
    """Input and output."""

    input_ptr: torch.Tensor  # [N, C]
    row: int  # strides
    column: int
    output_ptr: torch.Tensor  # [N, C] dense
    num_channels: int


class ConvSequences(NamedTuple):
    """The states and, in prefill, where each sequence starts and whether its state does so at zero."""

    states_ptr: torch.Tensor  # [num_slots, W - 1, C]
    slot: int  # stride
    slots_ptr: torch.Tensor  # [R] int64
    starts_ptr: torch.Tensor | None  # [R+1] int32
    anew_ptr: torch.Tensor | None  # [R] bool


def _prepare(
    activation: str | None,
    most: int,  # tokens of a sequence
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor | None,
    anew: torch.Tensor | None,
) -> ConvLaunches:
    _check(input, weight, bias, states, slots)
    if not weight.is_contiguous():
        raise ValueError(f"weight has strides {weight.stride()}; expected dense rows")
    num_channels, width = weight.shape
    block = min(MAX_CHANNELS, max(next_power_of_2(num_channels), 16))
    num_tiles, constants = -(-num_channels // block), {"ACTIVATION": activation, "WIDTH": width, "CHANNELS": block}
    step = Launch(conv_step_kernel, (len(slots), num_tiles), input.device, num_warps=2, **constants)
    if starts is None:
        return ConvLaunches(None, step)
    grid = (-(-most // TOKENS), len(slots), num_tiles)
    return ConvLaunches(Launch(conv_prefill_kernel, grid, input.device, TOKENS=TOKENS, num_warps=4, **constants), step)


@triton.jit
def _finish(total, rows, ACTIVATION: tl.constexpr):
    """The sum rounded, activated and rounded again."""
    dtype = rows.output_ptr.dtype.element_ty
    total = total.to(dtype)
    if ACTIVATION is not None:
        total = activate(total.to(tl.float32), ACTIVATION).to(dtype)
    return total


@triton.jit
def conv_prefill_kernel(
    rows,
    weight_ptr,  # [C, W] dense
    bias_ptr,
    sequences,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program convolves a tile of one sequence's tokens, of some channels; states are only read."""
    sequence = tl.program_id(1)
    start = tl.load(sequences.starts_ptr + sequence).to(tl.int64)
    length = tl.load(sequences.starts_ptr + sequence + 1) - start
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    has_channel = c < rows.num_channels
    slot = tl.load(sequences.slots_ptr + sequence)
    has_state = tl.load(sequences.anew_ptr + sequence) == 0
    total = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + c, mask=has_channel, other=0.0).to(tl.float32)
    for j in tl.static_range(WIDTH):
        source = token - (WIDTH - 1) + j
        is_new = has_channel & (source >= 0) & (source < length)
        x = tl.load(rows.input_ptr + (start + source) * rows.row + c * rows.column, mask=is_new, other=0.0)
        total_of = x.to(tl.float32)
        if j < WIDTH - 1:
            is_old = has_channel & (source < 0) & has_state
            place = sequences.states_ptr + slot * sequences.slot + (source + WIDTH - 1) * rows.num_channels + c
            total_of += tl.load(place, mask=is_old, other=0.0).to(tl.float32)
        total += total_of * tl.load(weight_ptr + c * WIDTH + j, mask=has_channel, other=0.0).to(tl.float32)
    place = rows.output_ptr + (start + token) * rows.num_channels + c
    tl.store(place, _finish(total, rows, ACTIVATION), mask=has_channel & (token < length))


@triton.jit
def conv_step_kernel(
    rows,
    weight_ptr,
    bias_ptr,
    sequences,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One program moves some channels of one sequence's state on; without starts it convolves the one token too.

    State i becomes the input or state that was i + length before it: no element is read after it was written.
    """
    sequence = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = c < rows.num_channels
    start, length = sequence.to(tl.int64), 1
    has_state = True
    if sequences.starts_ptr is not None:
        start = tl.load(sequences.starts_ptr + sequence).to(tl.int64)
        length = (tl.load(sequences.starts_ptr + sequence + 1) - start).to(tl.int32)
        has_state = tl.load(sequences.anew_ptr + sequence) == 0
    state = sequences.states_ptr + tl.load(sequences.slots_ptr + sequence) * sequences.slot + c
    if sequences.starts_ptr is None:
        total = tl.zeros((CHANNELS,), dtype=tl.float32)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + c, mask=mask, other=0.0).to(tl.float32)
        for j in tl.static_range(WIDTH):
            if j < WIDTH - 1:
                x = tl.load(state + j * rows.num_channels, mask=mask, other=0.0)
            else:
                x = tl.load(rows.input_ptr + start * rows.row + c * rows.column, mask=mask, other=0.0)
            weight = tl.load(weight_ptr + c * WIDTH + j, mask=mask, other=0.0).to(tl.float32)
            total += x.to(tl.float32) * weight
        tl.store(rows.output_ptr + start * rows.num_channels + c, _finish(total, rows, ACTIVATION), mask=mask)
    for i in tl.static_range(WIDTH - 1):
        source = length - (WIDTH - 1) + i
        new = rows.input_ptr + (start + source) * rows.row + c * rows.column
        old = state + (source + WIDTH - 1) * rows.num_channels
        x = tl.load(new, mask=mask & (source >= 0), other=0.0)
        x += tl.load(old, mask=mask & (source < 0) & has_state, other=0.0)
        tl.store(state + i * rows.num_channels, x, mask=mask)
