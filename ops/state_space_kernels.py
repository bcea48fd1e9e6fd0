"""The Triton kernels of `StateSpaceOp`; the maths is in `state_space.py`.

A program has some rows of one head's state in registers, which do not depend on each other, as `[S, rows]`: the state
is read and written once for each pass. Decode takes one token; prefill goes from chunk to chunk of its sequence. State
sizes are padded to a power of two by masks. A pass of 16 bits multiplies in TF32, whose rounding is below that of the
inputs; one of fp32 in fp32.

N packed tokens, R sequences, H heads of P numbers, G groups of B and C, S state size, T tokens of a chunk.
"""

from typing import Any, NamedTuple

from hybrid_engine.ops.dispatch import next_power_of_2, tl, triton

CHUNK_TOKENS = 16
STATE_NUMBERS = 4096  # that one program holds: 32 rows of a state of up to 128, 16 of a larger one


class SpaceForm(NamedTuple):
    """Constants of the kernels."""

    num_heads: int
    group: int  # heads of a group of B and C
    head_dim: int
    state_size: int
    block: int  # `state_size`, padded to a power of two
    rows: int
    tokens: int  # of a chunk


def build_form(num_heads: int, num_groups: int, head_dim: int, state_size: int) -> SpaceForm:
    """The form for these sizes."""
    block = max(next_power_of_2(state_size), 16)
    rows = max(16, min(32, STATE_NUMBERS // block, next_power_of_2(head_dim)))
    return SpaceForm(num_heads, num_heads // num_groups, head_dim, state_size, block, rows, CHUNK_TOKENS)


def chunk_warps(form: SpaceForm, is_fp32: bool) -> int:
    """Warps of a prefill's program, whose registers hold its operands (Triton 3.6 and 3.7, sm_90)."""
    return 8 if is_fp32 or form.block > 128 else 4


class SpaceRows(NamedTuple):
    """The tokens' inputs, with strides, and their outputs, `[N, H P]` dense."""

    mixed_ptr: Any
    mixed_row: int
    mixed_column: int
    dt_ptr: Any
    dt_row: int
    dt_column: int
    output_ptr: Any


class SpaceSteps(NamedTuple):
    """Parameters of the heads, `[H]`, and the limits of the time step."""

    a_log_ptr: Any
    dt_bias_ptr: Any
    skip_ptr: Any
    least: float
    most: float


class SpaceSequences(NamedTuple):
    """The states `[num_slots, H, P, S]` and, in prefill, where sequences start and whether theirs do so at zero."""

    states_ptr: Any
    slot: int  # stride
    slots_ptr: Any  # [R] int64
    starts_ptr: Any  # [R+1] int32
    anew_ptr: Any  # [R] bool


@triton.jit
def _read_tokens(rows, steps, token, is_token, head, place, FORM: tl.constexpr):
    """x `[T, rows]`, B and C `[T, S]`, the time step and the log of the decay `[T]` of one head; 0 where masked."""
    dtype = rows.output_ptr.dtype.element_ty
    mixed = rows.mixed_ptr + token[:, None] * rows.mixed_row
    mask = is_token[:, None] & (place < FORM.head_dim)[None, :]
    x = tl.load(mixed + (head * FORM.head_dim + place)[None, :] * rows.mixed_column, mask=mask, other=0.0)
    size = tl.arange(0, FORM.block)
    column = FORM.num_heads * FORM.head_dim + head // FORM.group * FORM.state_size + size
    width: tl.constexpr = FORM.num_heads // FORM.group * FORM.state_size  # of B of all groups
    mask = is_token[:, None] & (size < FORM.state_size)[None, :]
    b = tl.load(mixed + column[None, :] * rows.mixed_column, mask=mask, other=0.0)
    c = tl.load(mixed + (width + column)[None, :] * rows.mixed_column, mask=mask, other=0.0)
    step = tl.load(rows.dt_ptr + token * rows.dt_row + head * rows.dt_column, mask=is_token, other=0.0).to(tl.float32)
    step += tl.load(steps.dt_bias_ptr + head).to(dtype).to(tl.float32)
    step = step.to(dtype).to(tl.float32)
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0)))).to(dtype).to(tl.float32)
    step = tl.minimum(tl.maximum(step, steps.least), steps.most).to(dtype).to(tl.float32)
    step = tl.where(is_token, step, 0.0)
    rate = -tl.exp(tl.load(steps.a_log_ptr + head).to(tl.float32))
    return x.to(tl.float32), b.to(tl.float32), c.to(tl.float32), step, rate * step


@triton.jit
def _state_places(sequences, sequence, head, place, FORM: tl.constexpr):
    """Addresses `[S, rows]` of a state and their mask."""
    size = tl.arange(0, FORM.block)
    slot = tl.load(sequences.slots_ptr + sequence) * sequences.slot
    offset = (head * FORM.head_dim + place[None, :]) * FORM.state_size + size[:, None]
    mask = (size < FORM.state_size)[:, None] & (place < FORM.head_dim)[None, :]
    return sequences.states_ptr + slot + offset, mask


@triton.jit
def _store_output(rows, steps, token, is_token, head, place, output, x, FORM: tl.constexpr):
    """Writes `output + D x`, `[T, rows]`."""
    output += tl.load(steps.skip_ptr + head).to(tl.float32) * x
    at = (token[:, None] * FORM.num_heads + head) * FORM.head_dim + place[None, :]
    mask = is_token[:, None] & (place < FORM.head_dim)[None, :]
    tl.store(rows.output_ptr + at, output.to(rows.output_ptr.dtype.element_ty), mask=mask)


@triton.jit
def space_step_kernel(rows, steps, sequences, FORM: tl.constexpr):
    """One token of one row: some rows of one head's state."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.program_id(2) * FORM.rows + tl.arange(0, FORM.rows)
    token = row + tl.arange(0, 1)
    x, b, c, step, decay = _read_tokens(rows, steps, token, token >= 0, head, place, FORM)
    places, mask = _state_places(sequences, row, head, place, FORM)
    b, c = tl.sum(b, axis=0)[:, None], tl.sum(c, axis=0)[:, None]  # [S, 1], of the one token
    state = tl.load(places, mask=mask, other=0.0) * tl.exp(tl.sum(decay, axis=0)) + b * (x * step[:, None])
    tl.store(places, state, mask=mask)
    output = tl.sum(state * c, axis=0)[None, :]
    _store_output(rows, steps, token, token >= 0, head, place, output, x, FORM)


@triton.jit
def space_chunks_kernel(rows, steps, sequences, FORM: tl.constexpr, PRECISION: tl.constexpr):
    """All tokens of one sequence: some rows of one head's state."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    place = tl.program_id(2) * FORM.rows + tl.arange(0, FORM.rows)
    start = tl.load(sequences.starts_ptr + sequence).to(tl.int64)
    length = (tl.load(sequences.starts_ptr + sequence + 1) - start).to(tl.int32)
    places, mask = _state_places(sequences, sequence, head, place, FORM)
    has_state = tl.load(sequences.anew_ptr + sequence) == 0
    state = tl.load(places, mask=mask & has_state, other=0.0)
    index = tl.arange(0, FORM.tokens)
    for first in range(0, length, FORM.tokens):
        is_token = first + index < length
        token = start + first + index
        x, b, c, step, decay = _read_tokens(rows, steps, token, is_token, head, place, FORM)
        total, last = tl.cumsum(decay, axis=0), tl.sum(decay, axis=0)
        is_before = index[:, None] >= index[None, :]
        between = tl.exp(tl.where(is_before, total[:, None] - total[None, :], float("-inf")))
        transposed, learned = tl.trans(b), x * step[:, None]
        scores = tl.dot(c, transposed, input_precision=PRECISION) * between
        output = tl.dot(c, state, input_precision=PRECISION) * tl.exp(total)[:, None]
        output += tl.dot(scores, learned, input_precision=PRECISION)
        learned *= tl.exp(last - total)[:, None]
        state = state * tl.exp(last) + tl.dot(transposed, learned, input_precision=PRECISION)
        _store_output(rows, steps, token, is_token, head, place, output, x, FORM)
    tl.store(places, state, mask=mask)
