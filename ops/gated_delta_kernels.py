"""The Triton kernels of `GatedDeltaOp`; the maths is in `gated_delta.py`.

A program has the state of one value head of one sequence in registers, or some of its columns, which do not depend on
each other: S is read and written once for each pass. Decode takes one token; prefill goes from chunk to chunk of its
sequence. Inside a chunk it solves for v' = (I + A)^-1 (beta (v - exp(G) S^T k)) row by row, so W is not needed. Key
dimensions are padded to a power of two by masks. A pass of 16 bits multiplies in TF32, whose rounding is below that of
the inputs; one of fp32 in fp32.

R sequences, K key heads, V value heads, Dk and Dv their dimensions, C tokens of a chunk.
"""

from typing import Any, NamedTuple

from hybrid_engine.ops.dispatch import tl, triton

CHUNK_TOKENS = 16  # 32 do not fit the registers of 4 warps (Triton 3.6, sm_90)
COLUMNS = 32  # of a state that one program holds
EPS = tl.constexpr(1e-6)


class DeltaForm(NamedTuple):
    """Constants of the kernels."""

    num_key_heads: int
    group: int  # value heads of a key head
    key_dim: int
    value_dim: int
    block: int  # `key_dim`, padded to a power of two
    columns: int
    tokens: int  # of a chunk


class DeltaRows(NamedTuple):
    """The tokens' inputs, with strides, and their outputs, `[N, V Dv]` dense."""

    mixed_ptr: Any
    mixed_row: int
    mixed_column: int
    a_ptr: Any
    a_row: int
    a_column: int
    b_ptr: Any
    b_row: int
    b_column: int
    output_ptr: Any


class DeltaDecay(NamedTuple):
    """Parameters of the decay, `[V]`, and the factor of beta."""

    a_log_ptr: Any
    dt_bias_ptr: Any
    beta_scale: float


class DeltaSequences(NamedTuple):
    """The states `[num_slots, V, Dk, Dv]` and, in prefill, where sequences start and whether theirs do so at zero."""

    states_ptr: Any
    slot: int  # stride
    slots_ptr: Any  # [R] int64
    starts_ptr: Any  # [R+1] int32
    anew_ptr: Any  # [R] bool


@triton.jit
def _normed(x, scale):
    """`x [T, Dk]` over the length of its rows, times `scale`."""
    return x * (scale * tl.rsqrt(tl.sum(x * x, axis=1) + EPS))[:, None]


@triton.jit
def _read_tokens(rows, decay, token, is_token, head, columns, FORM: tl.constexpr):
    """q and k `[T, Dk]`, v `[T, columns]`, g and beta `[T]` of some tokens for one value head; 0 where masked."""
    DIM: tl.constexpr = FORM.key_dim
    KEYS: tl.constexpr = FORM.num_key_heads * DIM
    dtype = rows.output_ptr.dtype.element_ty
    key = tl.arange(0, FORM.block)
    mixed = rows.mixed_ptr + token[:, None] * rows.mixed_row
    place, mask = head // FORM.group * DIM + key[None, :], is_token[:, None] & (key < DIM)[None, :]
    q = tl.load(mixed + place * rows.mixed_column, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(mixed + (KEYS + place) * rows.mixed_column, mask=mask, other=0.0).to(tl.float32)
    place, mask = 2 * KEYS + head * FORM.value_dim + columns, is_token[:, None] & (columns < FORM.value_dim)[None, :]
    v = tl.load(mixed + place[None, :] * rows.mixed_column, mask=mask, other=0.0).to(tl.float32)
    step = tl.load(rows.a_ptr + token * rows.a_row + head * rows.a_column, mask=is_token, other=0.0).to(tl.float32)
    step += tl.load(decay.dt_bias_ptr + head).to(tl.float32)
    rate = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    g = tl.where(is_token, -tl.exp(tl.load(decay.a_log_ptr + head).to(tl.float32)) * rate, 0.0)
    beta = tl.load(rows.b_ptr + token * rows.b_row + head * rows.b_column, mask=is_token, other=0.0).to(tl.float32)
    beta = tl.where(is_token, tl.sigmoid(beta).to(dtype).to(tl.float32) * decay.beta_scale, 0.0)
    return _normed(q, 1.0 / tl.sqrt(DIM * 1.0)), _normed(k, 1.0), v, g, beta


@triton.jit
def _state_places(sequences, sequence, head, columns, FORM: tl.constexpr):
    """Addresses `[Dk, columns]` of a state and their mask."""
    key = tl.arange(0, FORM.block)
    slot = tl.load(sequences.slots_ptr + sequence) * sequences.slot
    place = (head * FORM.key_dim + key[:, None]) * FORM.value_dim + columns[None, :]
    mask = (key < FORM.key_dim)[:, None] & (columns < FORM.value_dim)[None, :]
    return sequences.states_ptr + slot + place, mask


@triton.jit
def delta_step_kernel(rows, decay, sequences, FORM: tl.constexpr):
    """One token of one row: some columns of one value head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.program_id(2) * FORM.columns + tl.arange(0, FORM.columns)
    token = row + tl.arange(0, 1)
    q, k, v, g, beta = _read_tokens(rows, decay, token, token >= 0, head, columns, FORM)
    places, mask = _state_places(sequences, row, head, columns, FORM)
    decayed = tl.load(places, mask=mask, other=0.0) * tl.exp(tl.sum(g, axis=0))
    q, k = tl.sum(q, axis=0)[:, None], tl.sum(k, axis=0)[:, None]  # [Dk, 1], of the one token
    delta = (tl.sum(v, axis=0) - tl.sum(decayed * k, axis=0)) * tl.sum(beta, axis=0)
    state = decayed + k * delta[None, :]
    tl.store(places, state, mask=mask)
    output = rows.output_ptr + (row * FORM.num_key_heads * FORM.group + head) * FORM.value_dim + columns
    result = tl.sum(state * q, axis=0).to(rows.output_ptr.dtype.element_ty)
    tl.store(output, result, mask=columns < FORM.value_dim)


@triton.jit
def delta_chunks_kernel(rows, decay, sequences, FORM: tl.constexpr, PRECISION: tl.constexpr):
    """All tokens of one sequence: some columns of one value head."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * FORM.columns + tl.arange(0, FORM.columns)
    start = tl.load(sequences.starts_ptr + sequence).to(tl.int64)
    length = (tl.load(sequences.starts_ptr + sequence + 1) - start).to(tl.int32)
    places, mask = _state_places(sequences, sequence, head, columns, FORM)
    has_state = tl.load(sequences.anew_ptr + sequence) == 0
    state = tl.load(places, mask=mask & has_state, other=0.0)
    place = tl.arange(0, FORM.tokens)
    for first in range(0, length, FORM.tokens):
        is_token = first + place < length
        token = start + first + place
        q, k, v, g, beta = _read_tokens(rows, decay, token, is_token, head, columns, FORM)
        total = tl.cumsum(g, axis=0)
        grown, last = tl.exp(total), tl.sum(g, axis=0)
        is_before = place[:, None] >= place[None, :]
        between = tl.exp(tl.where(is_before, total[:, None] - total[None, :], float("-inf")))
        transposed = tl.trans(k)
        system = tl.dot(k, transposed, input_precision=PRECISION) * between * beta[:, None]
        scores = tl.dot(q, transposed, input_precision=PRECISION) * between
        known = tl.dot(k, state, input_precision=PRECISION) * grown[:, None]
        new = (v - known) * beta[:, None]
        for i in range(1, FORM.tokens):  # row i: the rows before it are solved
            weights = tl.sum(tl.where((place == i)[:, None] & (place < i)[None, :], system, 0.0), axis=0)
            new -= tl.where((place == i)[:, None], tl.sum(weights[:, None] * new, axis=0)[None, :], 0.0)
        output = tl.dot(q, state, input_precision=PRECISION) * grown[:, None]
        output += tl.dot(scores, new, input_precision=PRECISION)
        written = tl.dot(transposed, new * tl.exp(last - total)[:, None], input_precision=PRECISION)
        state = state * tl.exp(last) + written
        at = (token[:, None] * (FORM.num_key_heads * FORM.group) + head) * FORM.value_dim + columns[None, :]
        is_here = is_token[:, None] & (columns < FORM.value_dim)[None, :]
        tl.store(rows.output_ptr + at, output.to(rows.output_ptr.dtype.element_ty), mask=is_here)
    tl.store(places, state, mask=mask)
