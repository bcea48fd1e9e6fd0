"""The Triton kernels of `SoftmaxContextOp` and their tile sizes; the maths is in `softmax_context.py`.

Decode is one kernel if the context fits one split, else two. A program takes one row, one KV head and `SPLIT` tokens:
it norms and rotates the G query heads and the new key, keeps the new key and value in registers (the program whose
split contains their place also writes them), and reads the split's keys and values once for all G heads. The second
kernel merges the splits by their log-sum-exp. The split is a constant and programs without work return at once, so a
row's result depends only on the row.

Prefill is two kernels: one norms, rotates and writes the workspace, the other is flash attention (Dao 2023,
arXiv 2307.08691) over packed sequences. Head sizes are padded to a power of two by masks.

Kernels take tuples of related arguments; Triton specializes on pointers of None in them.

N packed tokens, S decoded rows, H query heads, K key/value heads, G = H / K, D head dimension.
"""

from typing import Any, NamedTuple

from hybrid_engine.ops.dispatch import next_power_of_2, tl, triton

MAX_HEAD_DIM = 512
SPLIT = 256  # tokens of one decode program
# Triton spends two of the five on the block table's look-up, which the addresses of keys and values depend on: two
# tiles are in flight (triton 3.6).
DECODE_STAGES = 5
SPLITS_AT_ONCE = 16  # number that the merging kernel loads together
STORE_TOKENS = 16  # tokens of one program that writes the workspace in prefill
NORM_KINDS = {None: 0, "rms": 1, "rms_fp32": 2, "rms_offset": 3}


class NewHeads(NamedTuple):
    """Queries, keys and values of the tokens of a pass, vectors of D, each with its strides."""

    q_ptr: Any  # [N, K, G, D]
    q_row: int
    q_kv_head: int
    q_group: int
    k_ptr: Any  # [N, K, D]
    k_row: int
    k_head: int
    v_ptr: Any  # [N, K, D]
    v_row: int
    v_head: int


class Changes(NamedTuple):
    """Norms and rotation of queries and keys; pointers of None: not applied."""

    cos_ptr: Any  # [N, rotary dimensions]
    sin_ptr: Any  # the same
    angles_row: int  # stride of both
    q_gamma_ptr: Any  # [D]
    k_gamma_ptr: Any  # [D]
    eps: float


class Cache(NamedTuple):
    """The KV workspace of a layer, `[num_blocks, K, block_size, D]`, with its strides."""

    keys_ptr: Any
    values_ptr: Any
    block: int
    head: int
    place: int


class Tables(NamedTuple):
    """Block tables `[S, n]` int64."""

    ptr: Any
    row: int
    block_size: int


class AttentionScores(NamedTuple):
    """Parameters of the scores."""

    scale: float
    window: int
    softcap: float
    sinks_ptr: Any  # [H], or None
    alibi_ptr: Any  # [H] fp32, or None


class SplitContexts(NamedTuple):
    """The context of each split: `[S, H, num_splits, D]` fp32; with a single split in the dtype of q, without `lse`."""

    context_ptr: Any
    lse_ptr: Any  # [S, H, num_splits] fp32, the log-sum-exp of each split's scores


class Changed(NamedTuple):
    """Outputs for queries and keys that are normed or rotated, dense."""

    q_ptr: Any  # [N, K, G, D]
    k_ptr: Any  # [N, K, D]


class AttentionForm(NamedTuple):
    """The form of a layer's attention, constant in the kernels."""

    num_kv_heads: int  # K
    groups: int  # G
    head_dim: int  # D
    dim: int  # D padded
    rotary_dim: int  # 0: none
    norm: int  # of NORM_KINDS
    is_interleaved: bool
    has_window: bool
    has_softcap: bool
    upcasts: bool  # see `_dot`


class DecodeTiles(NamedTuple):
    """Tile sizes of decode, constant in its kernel."""

    heads: int  # G padded
    tokens: int  # loaded together
    split: int


class PrefillTiles(NamedTuple):
    """Tile sizes of prefill, constant in its kernel."""

    queries: int
    keys: int


def padded_dim(head_dim: int) -> int:
    """The tile's width for a head: `tl.dot` requires at least 16 and a power of two."""
    return max(16, next_power_of_2(head_dim))


def padded_groups(groups: int) -> int:
    """The tile's height for the query heads of one KV head, by the same rule."""
    return max(16, next_power_of_2(groups))


def decode_tiles(form: AttentionForm, element_size: int) -> DecodeTiles:
    """Tile sizes of decode: at most 16 KiB each of keys and values are loaded at once, and scores fit the registers.

    For heads of 256 bytes and more 32 tokens: with less memory per program more of them share an SM, which at 32 and 64
    rows of 1,000 and 2,000 tokens takes 0.86 and 0.89 of the time (H200, `benchmarks/tune_attention.py`).
    """
    heads, width = padded_groups(form.groups), form.dim * element_size
    tokens = min(16384 // width, 32 if width >= 256 else 128)
    return DecodeTiles(heads, max(16, min(128, tokens, 8192 // heads)), SPLIT)


def decode_warps(element_size: int) -> int:
    """Number of warps of decode: fp32 heads of 128 spill 344 bytes at 4 and none at 8 (triton 3.6; not timed)."""
    return 8 if element_size == 4 else 4


def prefill_tiles(head_dim: int, element_size: int) -> tuple[PrefillTiles, int]:
    """Tile sizes and number of warps of flash attention."""
    width = padded_dim(head_dim) * element_size
    if element_size == 4:  # no tensor cores: everything is in registers
        return PrefillTiles(*((32, 32) if width <= 512 else (16, 16))), 4
    if width <= 256:
        return PrefillTiles(128, 64), 4 if width <= 128 else 8
    return PrefillTiles(64, 32), 8


@triton.jit
def _dot(a, b, UPCASTS: tl.constexpr):
    """`a [M, L] b [L, N]` in fp32; the interpreter would multiply the bits of bfloat16."""
    if UPCASTS:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _normed(x, gamma, inverse, NORM: tl.constexpr):
    """`x` times `inverse` and the weight, rounded where that kind of norm rounds; fp32."""
    if NORM == 1:
        y = (x.to(tl.float32) * inverse).to(x.dtype).to(tl.float32) * gamma
    elif NORM == 2:
        y = x.to(tl.float32) * inverse * gamma
    else:
        y = x.to(tl.float32) * inverse * (1.0 + gamma)
    return y.to(x.dtype).to(tl.float32)


@triton.jit
def _load_heads(
    x_ptr,
    offsets,  # [M, 1] start of each head
    is_row,  # [M, 1] True if the head exists
    gamma_ptr,
    changes,
    angles,  # [M, 1] or [1, 1] start of its rows of cos and sin
    FORM: tl.constexpr,
):
    """Heads `[M, DIM]`, normed and rotated, in their dtype; zero at and after HEAD_DIM.

    A rotary partner is loaded a second time, from the first-level cache, instead of being moved between threads.
    """
    HEAD_DIM: tl.constexpr = FORM.head_dim
    ROTARY_DIM: tl.constexpr = FORM.rotary_dim
    NORM: tl.constexpr = FORM.norm
    d = tl.arange(0, FORM.dim)[None, :]
    is_in = is_row & (d < HEAD_DIM)
    loaded = tl.load(x_ptr + offsets + d, mask=is_in, other=0.0)
    x = loaded.to(tl.float32)
    inverse = 1.0
    if NORM != 0:
        inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=1, keep_dims=True) / HEAD_DIM + changes.eps)
        gamma = tl.load(gamma_ptr + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        x = _normed(loaded, gamma, inverse, NORM)
    if ROTARY_DIM != 0:
        rotates = d < ROTARY_DIM
        HALF: tl.constexpr = ROTARY_DIM // 2
        partner = d ^ 1 if FORM.is_interleaved else tl.where(d < HALF, d + HALF, d - HALF)
        partner = tl.where(rotates, partner, d)
        other = tl.load(x_ptr + offsets + partner, mask=is_row & rotates, other=0.0)
        y = other.to(tl.float32)
        if NORM != 0:
            partner_gamma = tl.load(gamma_ptr + partner, mask=rotates, other=0.0).to(tl.float32)
            y = _normed(other, partner_gamma, inverse, NORM)
        cos = tl.load(changes.cos_ptr + angles + d, mask=is_row & rotates, other=1.0).to(tl.float32)
        sin = tl.load(changes.sin_ptr + angles + d, mask=is_row & rotates, other=0.0).to(tl.float32)
        x = x * cos + y * sin
    return x.to(loaded.dtype)


@triton.jit
def decode_kernel(new, changes, cache, tables, scores, positions_ptr, parts, FORM: tl.constexpr, TILES: tl.constexpr):
    """Programs: rows, key heads, splits of the context."""
    GROUPS: tl.constexpr = FORM.groups
    HEAD_DIM: tl.constexpr = FORM.head_dim
    DIM: tl.constexpr = FORM.dim
    UPCASTS: tl.constexpr = FORM.upcasts
    HEADS: tl.constexpr = TILES.heads
    TILE: tl.constexpr = TILES.tokens
    SPLIT: tl.constexpr = TILES.split
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.load(positions_ptr + row).to(tl.int32)  # 64-bit division is slow
    begin = split * SPLIT
    end = begin + SPLIT
    holds_new = position // SPLIT == split
    if FORM.has_window:
        begin = tl.maximum(begin, position - scores.window + 1)
    if (begin > position) | (begin >= end):
        return
    end = tl.minimum(end, position)

    g = tl.arange(0, HEADS)
    d = tl.arange(0, DIM)
    is_group = g < GROUPS
    is_dim = d < HEAD_DIM
    head = kv_head * GROUPS + g
    one = tl.arange(0, 1)[:, None]
    angles = row * changes.angles_row + one
    q_starts = row * new.q_row + kv_head * new.q_kv_head + g[:, None] * new.q_group
    q = _load_heads(new.q_ptr, q_starts, is_group[:, None], changes.q_gamma_ptr, changes, angles, FORM)
    k_start = row * new.k_row + kv_head * new.k_head + one
    new_k = _load_heads(new.k_ptr, k_start, one == 0, changes.k_gamma_ptr, changes, angles, FORM)
    new_v = tl.load(new.v_ptr + row * new.v_row + kv_head * new.v_head + d[None, :], mask=is_dim[None, :], other=0.0)
    if holds_new:
        block = tl.load(tables.ptr + row * tables.row + position // tables.block_size)
        inside = (position % tables.block_size) * cache.place
        place = block * cache.block + kv_head * cache.head + inside + d[None, :]
        tl.store(cache.keys_ptr + place, new_k, mask=is_dim[None, :])
        tl.store(cache.values_ptr + place, new_v, mask=is_dim[None, :])

    new_score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), axis=1) * scores.scale
    if FORM.has_softcap:
        new_score = scores.softcap * _tanh(new_score / scores.softcap)
    if scores.alibi_ptr is not None:
        slope = tl.load(scores.alibi_ptr + head, mask=is_group, other=0.0)
    highest = tl.where(holds_new, new_score, float("-inf"))
    total = tl.where(holds_new, tl.full([HEADS], 1.0, tl.float32), 0.0)
    context = tl.where(holds_new, tl.broadcast_to(new_v.to(tl.float32), [HEADS, DIM]), 0.0)

    for start in range(begin, end, TILE):
        tokens = start + tl.arange(0, TILE)
        is_token = tokens < end
        blocks = tl.load(tables.ptr + row * tables.row + tokens // tables.block_size, mask=is_token, other=0)
        places = blocks * cache.block + kv_head * cache.head + (tokens % tables.block_size) * cache.place
        is_loaded = is_token[:, None] & is_dim[None, :]
        k = tl.load(cache.keys_ptr + places[:, None] + d[None, :], mask=is_loaded, other=0.0)
        v = tl.load(cache.values_ptr + places[:, None] + d[None, :], mask=is_loaded, other=0.0)
        score = _dot(q, tl.trans(k), UPCASTS) * scores.scale
        if FORM.has_softcap:
            score = scores.softcap * _tanh(score / scores.softcap)
        if scores.alibi_ptr is not None:
            score += slope[:, None] * (tokens - position)[None, :].to(tl.float32)
        score = tl.where(is_token[None, :], score, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, axis=1))
        probs = tl.exp(score - new_highest[:, None])
        rescale = tl.exp(highest - new_highest)
        total = total * rescale + tl.sum(probs, axis=1)
        context = context * rescale[:, None] + _dot(probs.to(v.dtype), v, UPCASTS)
        highest = new_highest

    lse = highest + tl.log(total)
    context = context / total[:, None]
    num_heads = tl.num_programs(1) * GROUPS
    num_splits = tl.num_programs(2)
    target = (row * num_heads + head) * num_splits + split
    if parts.lse_ptr is None:
        if scores.sinks_ptr is not None:  # the same bits as the merging kernel
            sink = tl.load(scores.sinks_ptr + head, mask=is_group, other=0.0).to(tl.float32)
            top = tl.maximum(lse, sink)
            weight = tl.exp(lse - top)
            context = context * weight[:, None] / (tl.exp(sink - top) + weight)[:, None]
    else:
        tl.store(parts.lse_ptr + target, lse, mask=is_group)
    tl.store(
        parts.context_ptr + target[:, None] * HEAD_DIM + d[None, :],
        context.to(parts.context_ptr.dtype.element_ty),
        mask=is_group[:, None] & is_dim[None, :],
    )


@triton.jit
def merge_kernel(
    parts,
    scores,
    positions_ptr,
    output_ptr,  # [S, H, D]
    num_splits,
    FORM: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
):
    """Merges the splits of one row and one head that had work; the others wrote nothing."""
    HEAD_DIM: tl.constexpr = FORM.head_dim
    DIM: tl.constexpr = FORM.dim
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + row).to(tl.int32)
    first = position * 0
    if FORM.has_window:
        first = tl.maximum(position - scores.window + 1, first) // SPLIT
    last = position // SPLIT
    d = tl.arange(0, DIM)
    is_dim = d < HEAD_DIM
    base = (row * tl.num_programs(1) + head) * num_splits
    context = tl.zeros([DIM], tl.float32)
    if scores.sinks_ptr is not None:
        top = tl.load(scores.sinks_ptr + head).to(tl.float32)
        total = top * 0.0 + 1.0
    else:
        top = tl.load(parts.lse_ptr + base + first)
        total = top * 0.0
    for start in range(first, last + 1, SPLITS_AT_ONCE):
        splits = start + tl.arange(0, SPLITS_AT_ONCE)
        is_split = splits <= last
        lse = tl.load(parts.lse_ptr + base + splits, mask=is_split, other=float("-inf"))
        partial = tl.load(
            parts.context_ptr + (base + splits)[:, None] * HEAD_DIM + d[None, :],
            mask=is_split[:, None] & is_dim[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        rescale = tl.exp(top - new_top)
        weights = tl.exp(lse - new_top)
        total = total * rescale + tl.sum(weights, axis=0)
        context = context * rescale + tl.sum(partial * weights[:, None], axis=0)
        top = new_top
    context = context / total
    output = output_ptr + (row * tl.num_programs(1) + head) * HEAD_DIM + d
    tl.store(output, context.to(output_ptr.dtype.element_ty), mask=is_dim)


@triton.jit
def store_kernel(
    new,
    changes,
    cache,
    blocks_ptr,
    offsets_ptr,
    changed,
    num_tokens,
    FORM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Heads 0 to K - 1 are the keys and values, which are written to the workspace; the other H are the queries."""
    NUM_KV_HEADS: tl.constexpr = FORM.num_kv_heads
    GROUPS: tl.constexpr = FORM.groups
    HEAD_DIM: tl.constexpr = FORM.head_dim
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    d = tl.arange(0, FORM.dim)[None, :]
    is_token = (tokens < num_tokens)[:, None]
    is_in = is_token & (d < HEAD_DIM)
    rows = tokens[:, None]
    angles = rows * changes.angles_row
    if head < NUM_KV_HEADS:
        k_starts = rows * new.k_row + head * new.k_head
        k = _load_heads(new.k_ptr, k_starts, is_token, changes.k_gamma_ptr, changes, angles, FORM)
        v = tl.load(new.v_ptr + rows * new.v_row + head * new.v_head + d, mask=is_in, other=0.0)
        blocks = tl.load(blocks_ptr + rows, mask=is_token, other=0)
        offsets = tl.load(offsets_ptr + rows, mask=is_token, other=0)
        places = blocks * cache.block + head * cache.head + offsets * cache.place + d
        tl.store(cache.keys_ptr + places, k, mask=is_in)
        tl.store(cache.values_ptr + places, v, mask=is_in)
        if (FORM.rotary_dim != 0) | (FORM.norm != 0):
            tl.store(changed.k_ptr + (rows * NUM_KV_HEADS + head) * HEAD_DIM + d, k, mask=is_in)
    else:
        query_head = head - NUM_KV_HEADS
        q_starts = rows * new.q_row + (query_head // GROUPS) * new.q_kv_head + (query_head % GROUPS) * new.q_group
        q = _load_heads(new.q_ptr, q_starts, is_token, changes.q_gamma_ptr, changes, angles, FORM)
        tl.store(changed.q_ptr + (rows * NUM_KV_HEADS * GROUPS + query_head) * HEAD_DIM + d, q, mask=is_in)


@triton.jit
def prefill_kernel(
    new,  # its keys and values are those that the queries attend to
    starts_ptr,  # [R+1]: start of the queries of each sequence
    key_starts_ptr,  # [R+1]: start of its keys, the last of which belong to its queries
    scores,
    output_ptr,  # [N, H, D]
    IS_CAUSAL: tl.constexpr,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
):
    """One tile of queries of one head of one sequence; the last tiles, which attend to most keys, come first."""
    GROUPS: tl.constexpr = FORM.groups
    HEAD_DIM: tl.constexpr = FORM.head_dim
    DIM: tl.constexpr = FORM.dim
    UPCASTS: tl.constexpr = FORM.upcasts
    QUERIES: tl.constexpr = TILES.queries
    KEYS: tl.constexpr = TILES.keys
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = tl.program_id(1)
    head = tl.program_id(2)
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    length = (tl.load(starts_ptr + sequence + 1) - start).to(tl.int32)
    if tile * QUERIES >= length:
        return
    key_start = tl.load(key_starts_ptr + sequence).to(tl.int64)
    key_length = (tl.load(key_starts_ptr + sequence + 1) - key_start).to(tl.int32)
    num_before = key_length - length  # keys before the first query's
    kv_head = head // GROUPS
    i = tile * QUERIES + tl.arange(0, QUERIES)
    place = tl.minimum(i, length - 1) + num_before  # those past the end attend to the keys of the last
    d = tl.arange(0, DIM)
    is_dim = d < HEAD_DIM
    is_query = (i < length)[:, None] & is_dim[None, :]
    q_start = new.q_ptr + start * new.q_row + kv_head * new.q_kv_head + (head % GROUPS) * new.q_group
    k_start = new.k_ptr + key_start * new.k_row + kv_head * new.k_head
    v_start = new.v_ptr + key_start * new.v_row + kv_head * new.v_head
    q = tl.load(q_start + i.to(tl.int64)[:, None] * new.q_row + d[None, :], mask=is_query, other=0.0)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    context = tl.zeros([QUERIES, DIM], tl.float32)
    if scores.alibi_ptr is not None:
        slope = tl.load(scores.alibi_ptr + head)
    begin = 0
    if FORM.has_window:
        begin = tl.maximum(tile * QUERIES + num_before - scores.window + 1, 0) // KEYS * KEYS
    end = key_length
    if IS_CAUSAL:
        end = tl.minimum((tile + 1) * QUERIES + num_before, key_length)
    for key_start in range(begin, end, KEYS):
        j = key_start + tl.arange(0, KEYS)
        is_key = (j < key_length)[:, None] & is_dim[None, :]
        k = tl.load(k_start + j.to(tl.int64)[:, None] * new.k_row + d[None, :], mask=is_key, other=0.0)
        v = tl.load(v_start + j.to(tl.int64)[:, None] * new.v_row + d[None, :], mask=is_key, other=0.0)
        score = _dot(q, tl.trans(k), UPCASTS) * scores.scale
        if FORM.has_softcap:
            score = scores.softcap * _tanh(score / scores.softcap)
        distance = place[:, None] - j[None, :]
        if scores.alibi_ptr is not None:
            score -= slope * distance.to(tl.float32)
        is_seen = distance >= 0
        if not IS_CAUSAL:
            is_seen = (j < key_length)[None, :] & (i >= 0)[:, None]
        if FORM.has_window:
            is_seen = is_seen & (distance < scores.window)
        score = tl.where(is_seen, score, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, axis=1))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # all keys so far are before the window
        probs = tl.exp(score - shift[:, None])
        rescale = tl.exp(highest - shift)
        total = total * rescale + tl.sum(probs, axis=1)
        context = context * rescale[:, None] + _dot(probs.to(v.dtype), v, UPCASTS)
        highest = new_highest
    if scores.sinks_ptr is not None:
        sink = tl.load(scores.sinks_ptr + head).to(tl.float32)
        top = tl.maximum(highest, sink)
        rescale = tl.exp(highest - top)
        context = context * rescale[:, None]
        total = total * rescale + tl.exp(sink - top)
    context = context / total[:, None]
    num_heads = tl.num_programs(2)
    rows = (start + i.to(tl.int64)) * num_heads + head
    tl.store(output_ptr + rows[:, None] * HEAD_DIM + d[None, :], context.to(output_ptr.dtype.element_ty), mask=is_query)
