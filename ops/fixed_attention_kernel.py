"""The attention of `fixed_attention.py` in one Triton kernel, for prefill, decode and the trainer's forward.

A program takes one tile of queries of one sequence and one key head. It processes the chunks of keys in order, from the
start of the sequence or of the window up to the last key that one of the queries attends to. The chunk is the only
split, and its result is merged with the previous ones at once. A chunk that is hidden from a query does not change its
values: the largest score stays, sums are multiplied by exp(0) and get weights of exactly 0.

Places and numbers of queries and keys are run-time arguments only: a cache in blocks, packed sequences and padded ones
are computed by the same instructions. A decoded token fills one row of its tile, which costs little on a GPU that waits
for keys; but its context is not split over programs.

R sequences, N queries, H query heads, K key/value heads, G = H / K, D head dimension.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hybrid_engine.ops.dispatch import IS_INTERPRETED, Launch, prepared, tl, triton
from hybrid_engine.ops.fixed_product import aligned
from hybrid_engine.ops.softmax_context_kernels import _dot, _tanh, padded_dim


class AttentionTensors(NamedTuple):
    """The inputs of attention and `output [N, H, D]`, all dense."""

    q_ptr: Any  # [N, H, D]
    k_ptr: Any  # vectors of D
    v_ptr: Any
    sinks_ptr: Any  # [H], or None
    output_ptr: Any


class Queries(NamedTuple):
    """The queries of R sequences, concatenated."""

    query: torch.Tensor  # [N, H, D]
    starts: torch.Tensor  # [R + 1], integers: start of each sequence, and N
    positions: torch.Tensor  # [N] int64: position of each query in its sequence
    most: int  # upper bound of the queries of a sequence


class FixedScores(NamedTuple):
    """Parameters of the scores; constant per layer, so that they may compile to constants."""

    scale: float
    window: int
    softcap: float


class FixedForm(NamedTuple):
    """Form and tile sizes of a layer's attention, constant in the kernel."""

    groups: int  # G
    head_dim: int
    dim: int  # padded
    rows: int  # queries, each with the heads of its group
    keys: int
    has_window: bool
    has_softcap: bool
    upcasts: bool


class KeyVectors(NamedTuple):
    """Keys and values as vectors of D, dense and with the same layout, and the places of each sequence's vectors.

    Key j of a head is vector `tables[j // block_size] * block + (j % block_size) * place + head * head_stride`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    num_heads: int  # K
    tables: torch.Tensor  # [R, n] int64
    block_size: int
    block: int
    place: int
    head_stride: int


def of_cache(caches: tuple[torch.Tensor, torch.Tensor], tables: torch.Tensor) -> KeyVectors:
    """Caches `[num_blocks, K, block_size, D]`, in which sequences have the blocks `tables [R, n]`."""
    num_heads, block_size = caches[0].shape[1:3]
    return KeyVectors(*caches, num_heads, tables, block_size, num_heads * block_size, 1, block_size)


def of_packed(key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int) -> KeyVectors:
    """Packed sequences `[N, K, D]`, which start at `starts [R + 1]`: blocks that start at any token."""
    num_heads = key.shape[1]
    return KeyVectors(key, value, num_heads, starts[:-1, None].long(), longest, num_heads, num_heads, 1)


def of_padded(key: torch.Tensor, value: torch.Tensor) -> KeyVectors:
    """Padded sequences `[R, C, K, D]`: one block each."""
    num_rows, length, num_heads = key.shape[:3]
    tables = torch.arange(num_rows, device=key.device)[:, None]
    return KeyVectors(key, value, num_heads, tables, length, length * num_heads, num_heads, 1)


NOT_SPECIALIZED = ("table_row", "block_size", "block_vectors", "place_vectors", "head_vectors")


@triton.jit(
    do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=("starts_ptr", "positions_ptr", "tables_ptr")
)
def fixed_attention_kernel(
    heads,
    scores,
    starts_ptr,  # [R+1]: start of the queries of each sequence
    positions_ptr,  # [N]: position of each query in its sequence
    tables_ptr,
    table_row,
    block_size,
    block_vectors,
    place_vectors,
    head_vectors,
    FORM: tl.constexpr,
):
    """Programs: sequences, key heads, tiles of queries."""
    ROWS: tl.constexpr = FORM.rows
    KEYS: tl.constexpr = FORM.keys
    GROUPS: tl.constexpr = FORM.groups
    HEAD_DIM: tl.constexpr = FORM.head_dim
    DIM: tl.constexpr = FORM.dim
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    first = tl.load(starts_ptr + sequence).to(tl.int64)
    num_rows = (tl.load(starts_ptr + sequence + 1) - first) * GROUPS
    begin_row = (tl.num_programs(2) - 1 - tl.program_id(2)) * ROWS  # the last tiles attend to most keys and come first
    if begin_row >= num_rows:
        return
    row = begin_row + tl.arange(0, ROWS)
    is_row = row < num_rows
    d = tl.arange(0, DIM)
    is_dim = (d < HEAD_DIM)[None, :]
    position = tl.load(positions_ptr + first + row // GROUPS, mask=is_row, other=0).to(tl.int32)
    head = kv_head * GROUPS + row % GROUPS
    num_heads = tl.num_programs(1) * GROUPS
    vectors = (first + row // GROUPS) * num_heads + head
    places = vectors[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(heads.q_ptr + places, mask=is_row[:, None] & is_dim, other=0.0)
    reach = tl.max(position, 0)
    begin = reach * 0
    if FORM.has_window:
        lowest = tl.min(tl.where(is_row, position, reach), 0)
        begin = tl.maximum(lowest - scores.window + 1, 0) // KEYS * KEYS
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    context = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(begin, reach + 1, KEYS):
        j = start + tl.arange(0, KEYS)
        is_key = j <= reach
        block = tl.load(tables_ptr + sequence * table_row + j // block_size, mask=is_key, other=0)
        vector = block * block_vectors + (j % block_size).to(tl.int64) * place_vectors + kv_head * head_vectors
        key_places = vector[:, None] * HEAD_DIM + d[None, :]
        k = tl.load(heads.k_ptr + key_places, mask=is_key[:, None] & is_dim, other=0.0)
        v = tl.load(heads.v_ptr + key_places, mask=is_key[:, None] & is_dim, other=0.0)
        score = _dot(q, tl.trans(k), FORM.upcasts) * scores.scale
        if FORM.has_softcap:
            score = scores.softcap * _tanh(score / scores.softcap)
        distance = position[:, None] - j[None, :]
        is_seen = distance >= 0
        if FORM.has_window:
            is_seen = is_seen & (distance < scores.window)
        score = tl.where(is_seen, score, float("-inf"))
        top = tl.maximum(highest, tl.max(score, 1))
        shift = tl.where(top == float("-inf"), 0.0, top)  # all keys so far are hidden
        weights = tl.exp(score - shift[:, None])
        rescale = tl.exp(highest - shift)
        total = total * rescale + tl.sum(weights, 1)
        context = context * rescale[:, None] + _dot(weights.to(v.dtype), v, FORM.upcasts)
        highest = top
    if heads.sinks_ptr is not None:
        sink = tl.load(heads.sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)
        top = tl.maximum(highest, sink)
        rescale = tl.exp(highest - top)
        total = total * rescale + tl.exp(sink - top)
        context = context * rescale[:, None]
    context = context / tl.where(total == 0.0, 1.0, total)[:, None]  # for a row of padding all keys may be hidden
    tl.store(heads.output_ptr + places, context.to(heads.output_ptr.dtype.element_ty), mask=is_row[:, None] & is_dim)


def form_of(head_dim: int, groups: int, dtype: torch.dtype, has_window: bool, has_softcap: bool) -> FixedForm:
    """The single form of a layer's attention, independent of the inputs."""
    is_wide = padded_dim(head_dim) > 128
    rows, keys = (16, 32) if dtype == torch.float32 else (64, 32 if is_wide else 64)
    return FixedForm(groups, head_dim, padded_dim(head_dim), rows, keys, has_window, has_softcap, IS_INTERPRETED)


def num_warps(form: FixedForm) -> int:
    """Warps of a program: a context of 64 rows of 256 in fp32 does not fit the registers of four warps."""
    return 8 if form.dim > 128 else 4


def attend_by_kernel(
    queries: Queries, keys: KeyVectors, scores: tuple[float, int | None, float | None], sinks: torch.Tensor | None
) -> torch.Tensor:
    """`[N, H, D]`: the context of each query; `scores` are scale, window and softcap."""
    return _attend_keys(*queries, *keys[:2], keys.tables, [keys.num_heads, *keys[4:]], *scores, sinks)


# A single operation, so that dispatch modes do not see its inner operations.
@torch.library.custom_op("hybrid_engine::attend_keys", mutates_args=())
def _attend_keys(
    query: torch.Tensor,
    starts: torch.Tensor,
    positions: torch.Tensor,
    most: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    numbers: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    query, keys, values, tables = aligned(query), aligned(keys), aligned(values), tables.contiguous()
    output = torch.empty_like(query)
    launch = prepared(
        _prepare, window, softcap, most, tuple(numbers), query, keys, values, sinks, starts, positions, tables
    )
    launch(
        AttentionTensors(query, keys, values, sinks, output), FixedScores(scale, window or 0, softcap or 1.0),
        starts, positions, tables, tables.stride(0), *numbers[1:],
    )  # fmt: skip
    return output


def _prepare(
    window: int | None,
    softcap: float | None,
    most: int,
    numbers: tuple[int, ...],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor | None,
    starts: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
) -> Launch:
    (_, num_heads, head_dim), num_kv_heads = query.shape, numbers[0]
    form = form_of(head_dim, num_heads // num_kv_heads, query.dtype, window is not None, softcap is not None)
    grid = (len(starts) - 1, num_kv_heads, -(-most * form.groups // form.rows))
    return Launch(fixed_attention_kernel, grid, query.device, FORM=form, num_warps=num_warps(form), num_stages=2)
