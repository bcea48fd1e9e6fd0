"""The Triton kernels of `SoftmaxContextOp` and how they are started; the maths is told in `softmax_context.py`.

Decode is one kernel where the context fits one split, else two. A program takes one row, one KV head and
`SPLIT` tokens: it norms and rotates the G query heads and the new key, keeps the new key and value in
registers (the program whose split holds their place also writes them), and reads the split's keys and values
once for all G heads. The second kernel merges the splits by their log-sum-exp. The split is a constant and
programs without work leave at once, so a row's numbers depend on the row alone.

Prefill is two kernels: one norms, rotates and writes the workspace, the other is flash attention (Dao 2023,
arXiv 2307.08691) over packed sequences. Head sizes are padded to a power of two by masks.
"""

from hybrid_engine.ops.dispatch import next_power_of_2, tl, triton

MAX_HEAD_DIM = 256
SPLIT = 256  # tokens of one decode program
# Of the five, Triton spends two on the block table's look-up, which the addresses of keys and values wait for: two
# tiles are in flight (triton 3.6).
DECODE_STAGES = 5
SPLITS_AT_ONCE = 16  # that the merging kernel loads together
STORE_TOKENS = 16  # tokens of one program that writes the workspace in prefill
NORM_KINDS = {None: 0, "rms": 1, "rms_fp32": 2, "rms_offset": 3}


def padded_dim(head_dim: int) -> int:
    """The tile's width for a head: `tl.dot` wants at least 16 and a power of two."""
    return max(16, next_power_of_2(head_dim))


def padded_groups(groups: int) -> int:
    """The tile's height for the query heads of one KV head, by the same rule."""
    return max(16, next_power_of_2(groups))


def decode_tile(head_dim: int, groups: int, element_size: int) -> int:
    """Tokens loaded together: 16 KiB of keys and as much of values, and scores that fit the registers."""
    tokens = 16384 // (padded_dim(head_dim) * element_size)
    return max(16, min(128, tokens, 8192 // padded_groups(groups)))


def prefill_tiles(head_dim: int, element_size: int) -> tuple[int, int, int]:
    """Queries and keys of one flash-attention tile, and warps."""
    width = padded_dim(head_dim) * element_size
    if element_size == 4:  # no tensor cores: everything is in registers
        return (32, 32, 4) if width <= 512 else (16, 16, 4)
    if width <= 256:
        return 128, 64, (4 if width <= 128 else 8)
    return 64, 32, 8


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
    offsets,  # [M, 1] where each head starts
    is_row,  # [M, 1] True where there is one
    gamma_ptr,
    eps,
    cos_ptr,
    sin_ptr,
    angles,  # [M, 1] or [1, 1] where its row of cos and of sin starts
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    DIM: tl.constexpr,
):
    """Heads `[M, DIM]`, normed and rotated, in their dtype; zero beyond HEAD_DIM.

    A rotary partner is loaded a second time, from the first-level cache, rather than moved between threads.
    """
    d = tl.arange(0, DIM)[None, :]
    is_in = is_row & (d < HEAD_DIM)
    loaded = tl.load(x_ptr + offsets + d, mask=is_in, other=0.0)
    x = loaded.to(tl.float32)
    inverse = 1.0
    if NORM != 0:
        inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=1, keep_dims=True) / HEAD_DIM + eps)
        gamma = tl.load(gamma_ptr + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        x = _normed(loaded, gamma, inverse, NORM)
    if ROTARY_DIM != 0:
        rotates = d < ROTARY_DIM
        partner = d ^ 1 if IS_INTERLEAVED else tl.where(d < ROTARY_DIM // 2, d + ROTARY_DIM // 2, d - ROTARY_DIM // 2)
        partner = tl.where(rotates, partner, d)
        other = tl.load(x_ptr + offsets + partner, mask=is_row & rotates, other=0.0)
        y = other.to(tl.float32)
        if NORM != 0:
            partner_gamma = tl.load(gamma_ptr + partner, mask=rotates, other=0.0).to(tl.float32)
            y = _normed(other, partner_gamma, inverse, NORM)
        cos = tl.load(cos_ptr + angles + d, mask=is_row & rotates, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angles + d, mask=is_row & rotates, other=0.0).to(tl.float32)
        x = x * cos + y * sin
    return x.to(loaded.dtype)


@triton.jit
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    positions_ptr,
    tables_ptr,
    q_gamma_ptr,
    k_gamma_ptr,
    sinks_ptr,
    alibi_ptr,
    output_ptr,  # [S, H, num_splits, D]; of the dtype of q where there is one split, else fp32
    lse_ptr,  # [S, H, num_splits] fp32
    q_row,
    q_kv_head,
    q_group,
    k_row,
    k_head,
    v_row,
    v_head,
    cos_row,
    sin_row,
    cache_block,
    cache_head,
    cache_place,
    table_row,
    block_size,
    window,
    scale,
    softcap,
    eps,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    UPCASTS: tl.constexpr,
    IS_SINGLE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.load(positions_ptr + row).to(tl.int32)  # 64-bit division is slow
    begin = split * SPLIT
    end = begin + SPLIT
    holds_new = position // SPLIT == split
    if HAS_WINDOW:
        begin = tl.maximum(begin, position - window + 1)
    if (begin > position) | (begin >= end):
        return
    end = tl.minimum(end, position)

    g = tl.arange(0, HEADS)
    d = tl.arange(0, DIM)
    is_group = g < GROUPS
    is_dim = d < HEAD_DIM
    head = kv_head * GROUPS + g
    one = tl.arange(0, 1)[:, None]
    q = _load_heads(
        q_ptr, row * q_row + kv_head * q_kv_head + g[:, None] * q_group, is_group[:, None], q_gamma_ptr, eps,
        cos_ptr + row * cos_row, sin_ptr + row * sin_row, one, HEAD_DIM, ROTARY_DIM, NORM, IS_INTERLEAVED, DIM,
    )  # fmt: skip
    new_k = _load_heads(
        k_ptr, row * k_row + kv_head * k_head + one, one == 0, k_gamma_ptr, eps,
        cos_ptr + row * cos_row, sin_ptr + row * sin_row, one, HEAD_DIM, ROTARY_DIM, NORM, IS_INTERLEAVED, DIM,
    )  # fmt: skip
    new_v = tl.load(v_ptr + row * v_row + kv_head * v_head + d[None, :], mask=is_dim[None, :], other=0.0)
    if holds_new:
        block = tl.load(tables_ptr + row * table_row + position // block_size)
        place = block * cache_block + kv_head * cache_head + (position % block_size) * cache_place + d[None, :]
        tl.store(keys_ptr + place, new_k, mask=is_dim[None, :])
        tl.store(values_ptr + place, new_v, mask=is_dim[None, :])

    new_score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), axis=1) * scale
    if HAS_SOFTCAP:
        new_score = softcap * _tanh(new_score / softcap)
    if HAS_ALIBI:
        slope = tl.load(alibi_ptr + head, mask=is_group, other=0.0)
    highest = tl.where(holds_new, new_score, float("-inf"))
    total = tl.where(holds_new, tl.full([HEADS], 1.0, tl.float32), 0.0)
    context = tl.where(holds_new, tl.broadcast_to(new_v.to(tl.float32), [HEADS, DIM]), 0.0)

    for start in range(begin, end, TILE):
        tokens = start + tl.arange(0, TILE)
        is_token = tokens < end
        blocks = tl.load(tables_ptr + row * table_row + tokens // block_size, mask=is_token, other=0)
        places = blocks * cache_block + kv_head * cache_head + (tokens % block_size) * cache_place
        is_loaded = is_token[:, None] & is_dim[None, :]
        k = tl.load(keys_ptr + places[:, None] + d[None, :], mask=is_loaded, other=0.0)
        v = tl.load(values_ptr + places[:, None] + d[None, :], mask=is_loaded, other=0.0)
        scores = _dot(q, tl.trans(k), UPCASTS) * scale
        if HAS_SOFTCAP:
            scores = softcap * _tanh(scores / softcap)
        if HAS_ALIBI:
            scores += slope[:, None] * (tokens - position)[None, :].to(tl.float32)
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        probs = tl.exp(scores - new_highest[:, None])
        rescale = tl.exp(highest - new_highest)
        total = total * rescale + tl.sum(probs, axis=1)
        context = context * rescale[:, None] + _dot(probs.to(v.dtype), v, UPCASTS)
        highest = new_highest

    lse = highest + tl.log(total)
    context = context / total[:, None]
    num_heads = tl.num_programs(1) * GROUPS
    num_splits = tl.num_programs(2)
    target = (row * num_heads + head) * num_splits + split
    if IS_SINGLE:
        if HAS_SINKS:  # as the merging kernel computes it, to the bit
            sink = tl.load(sinks_ptr + head, mask=is_group, other=0.0).to(tl.float32)
            top = tl.maximum(lse, sink)
            weight = tl.exp(lse - top)
            context = context * weight[:, None] / (tl.exp(sink - top) + weight)[:, None]
    else:
        tl.store(lse_ptr + target, lse, mask=is_group)
    tl.store(
        output_ptr + target[:, None] * HEAD_DIM + d[None, :],
        context.to(output_ptr.dtype.element_ty),
        mask=is_group[:, None] & is_dim[None, :],
    )


@triton.jit
def merge_kernel(
    partial_ptr,  # [S, H, num_splits, D] fp32
    lse_ptr,  # [S, H, num_splits] fp32
    positions_ptr,
    sinks_ptr,
    output_ptr,  # [S, H, D]
    num_splits,
    window,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
):
    """Merges the splits of one row and one head that had work; the others left nothing behind."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + row).to(tl.int32)
    first = position * 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, first) // SPLIT
    last = position // SPLIT
    d = tl.arange(0, DIM)
    is_dim = d < HEAD_DIM
    base = (row * tl.num_programs(1) + head) * num_splits
    context = tl.zeros([DIM], tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks_ptr + head).to(tl.float32)
        total = top * 0.0 + 1.0
    else:
        top = tl.load(lse_ptr + base + first)
        total = top * 0.0
    for start in range(first, last + 1, SPLITS_AT_ONCE):
        splits = start + tl.arange(0, SPLITS_AT_ONCE)
        is_split = splits <= last
        lse = tl.load(lse_ptr + base + splits, mask=is_split, other=float("-inf"))
        partial = tl.load(
            partial_ptr + (base + splits)[:, None] * HEAD_DIM + d[None, :],
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
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    blocks_ptr,
    offsets_ptr,
    q_gamma_ptr,
    k_gamma_ptr,
    new_q_ptr,  # [N, K, G, D]
    new_k_ptr,  # [N, K, D]
    num_tokens,
    q_row,
    q_kv_head,
    q_group,
    k_row,
    k_head,
    v_row,
    v_head,
    cos_row,
    sin_row,
    cache_block,
    cache_head,
    cache_place,
    eps,
    NUM_KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Heads 0 to K - 1 are the keys and values, which go to the workspace; the H others the queries."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    d = tl.arange(0, DIM)[None, :]
    is_token = (tokens < num_tokens)[:, None]
    is_in = is_token & (d < HEAD_DIM)
    rows = tokens[:, None]
    cos_ptrs = rows * cos_row
    if head < NUM_KV_HEADS:
        k = _load_heads(
            k_ptr, rows * k_row + head * k_head, is_token, k_gamma_ptr, eps,
            cos_ptr, sin_ptr, cos_ptrs, HEAD_DIM, ROTARY_DIM, NORM, IS_INTERLEAVED, DIM,
        )  # fmt: skip
        v = tl.load(v_ptr + rows * v_row + head * v_head + d, mask=is_in, other=0.0)
        blocks = tl.load(blocks_ptr + rows, mask=is_token, other=0)
        offsets = tl.load(offsets_ptr + rows, mask=is_token, other=0)
        places = blocks * cache_block + head * cache_head + offsets * cache_place + d
        tl.store(keys_ptr + places, k, mask=is_in)
        tl.store(values_ptr + places, v, mask=is_in)
        if (ROTARY_DIM != 0) | (NORM != 0):
            tl.store(new_k_ptr + (rows * NUM_KV_HEADS + head) * HEAD_DIM + d, k, mask=is_in)
    else:
        query_head = head - NUM_KV_HEADS
        start = (query_head // GROUPS) * q_kv_head + (query_head % GROUPS) * q_group
        q = _load_heads(
            q_ptr, rows * q_row + start, is_token, q_gamma_ptr, eps,
            cos_ptr, sin_ptr, cos_ptrs, HEAD_DIM, ROTARY_DIM, NORM, IS_INTERLEAVED, DIM,
        )  # fmt: skip
        tl.store(new_q_ptr + (rows * NUM_KV_HEADS * GROUPS + query_head) * HEAD_DIM + d, q, mask=is_in)


@triton.jit
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    starts_ptr,  # [R+1]: where the queries of each sequence start
    key_starts_ptr,  # [R+1]: and its keys, of which the last are its queries'
    sinks_ptr,
    alibi_ptr,
    output_ptr,  # [N, H, D]
    q_row,
    q_kv_head,
    q_group,
    k_row,
    k_head,
    v_row,
    v_head,
    window,
    scale,
    softcap,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    UPCASTS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One tile of queries of one head of one sequence; the last tiles, which see most, come first."""
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
    place = tl.minimum(i, length - 1) + num_before  # those past the end see what the last sees
    d = tl.arange(0, DIM)
    is_dim = d < HEAD_DIM
    is_query = (i < length)[:, None] & is_dim[None, :]
    q_start = q_ptr + start * q_row + kv_head * q_kv_head + (head % GROUPS) * q_group
    k_start = k_ptr + key_start * k_row + kv_head * k_head
    v_start = v_ptr + key_start * v_row + kv_head * v_head
    q = tl.load(q_start + i.to(tl.int64)[:, None] * q_row + d[None, :], mask=is_query, other=0.0)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    context = tl.zeros([QUERIES, DIM], tl.float32)
    if HAS_ALIBI:
        slope = tl.load(alibi_ptr + head)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(tile * QUERIES + num_before - window + 1, 0) // KEYS * KEYS
    end = key_length
    if IS_CAUSAL:
        end = tl.minimum((tile + 1) * QUERIES + num_before, key_length)
    for key_start in range(begin, end, KEYS):
        j = key_start + tl.arange(0, KEYS)
        is_key = (j < key_length)[:, None] & is_dim[None, :]
        k = tl.load(k_start + j.to(tl.int64)[:, None] * k_row + d[None, :], mask=is_key, other=0.0)
        v = tl.load(v_start + j.to(tl.int64)[:, None] * v_row + d[None, :], mask=is_key, other=0.0)
        scores = _dot(q, tl.trans(k), UPCASTS) * scale
        if HAS_SOFTCAP:
            scores = softcap * _tanh(scores / softcap)
        distance = place[:, None] - j[None, :]
        if HAS_ALIBI:
            scores -= slope * distance.to(tl.float32)
        is_seen = distance >= 0
        if not IS_CAUSAL:
            is_seen = (j < key_length)[None, :] & (i >= 0)[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (distance < window)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # the window has not begun
        probs = tl.exp(scores - shift[:, None])
        rescale = tl.exp(highest - shift)
        total = total * rescale + tl.sum(probs, axis=1)
        context = context * rescale[:, None] + _dot(probs.to(v.dtype), v, UPCASTS)
        highest = new_highest
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        top = tl.maximum(highest, sink)
        rescale = tl.exp(highest - top)
        context = context * rescale[:, None]
        total = total * rescale + tl.exp(sink - top)
    context = context / total[:, None]
    num_heads = tl.num_programs(2)
    rows = (start + i.to(tl.int64)) * num_heads + head
    tl.store(output_ptr + rows[:, None] * HEAD_DIM + d[None, :], context.to(output_ptr.dtype.element_ty), mask=is_query)
