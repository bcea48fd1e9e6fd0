"""The Triton kernels of `SampleOp`; the maths is told in `sample.py`. S rows, V vocabulary, C chunks of a row.

The logits are cut into chunks, one program each, so that a single row keeps many programs busy too:

    scan     each chunk's maximum and sum of exponentials; the likeliest token of the chunk when greedy
    narrow   under top-k or top-p, eight times for each: four more bits of the smallest logit that is kept
    keep     under any filter: each chunk's sum over what is kept
    draw     one program per row merges the chunks and looks for its token inside one of them only
    greedy   one program per row merges the chunks

Without filters that is two launches, which move 4 V + 16 C bytes per row and, to draw, one chunk again. Where
what is drawn from is not the logits (filters, penalty, banned tokens), the scan also writes it, 4 V bytes, and each
pass of a filter reads it once, as a rule from the second-level cache. Nothing is sorted.

A threshold is searched on the bits of fp32 in an order that integers share. With w = 1 for top-k and exp(x - max)
for top-p, a pass sums w over the tokens that reach each of 16 thresholds, chunk by chunk; the next pass adds up the
chunks and goes on between two of them. Sums of one fixed order never fall when a term is added, so rounding cannot
make the search go astray. Everything a row draws depends on that row alone, to the bit.
"""

from hybrid_engine.ops.dispatch import tl, triton

CHUNK = 4096  # logits of one program
TILE = 512  # logits compared with all thresholds at once
WAYS = 16  # thresholds of a pass: four bits
SHIFTS = tuple(range(28, -1, -4))  # of the four bits that each pass settles
MAX_CHUNKS = 1024  # of a row, whose results one program merges


@triton.jit
def mix(x):
    """splitmix64's step on int64, which wraps; `&` makes the shifts logical."""
    x = x + (-7046029254386353131)
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * (-4658895280553007687)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * (-7723592293110705685)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def noise(key, draw):
    """What `keyed_uniform` gives, rounded to fp32."""
    bits = mix(mix(key) ^ draw)
    # 53 bits times a power of two: the conversion to fp32 is the only rounding.
    return ((bits >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float32) * 1.1102230246251565e-16


@triton.jit
def ordered(x):
    """int32 in the order of the fp32 `x`: -0.0 is 0.0, NaN is above all, as for torch's argmax and topk."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def top_and_sum(x):
    """Maximum of x and the sum of exp(x - maximum), 0 where nothing is above -inf; NaN makes the sum NaN."""
    top = tl.max(x, 0)
    return top, tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - top)), 0)


@triton.jit
def merge(stats_ptr, row, num_rows, num_chunks, CHUNKS: tl.constexpr):
    """A row's maximum and its chunks' sums `[CHUNKS]` relative to it, from `[2, S, C]` maxima and sums."""
    chunks = tl.arange(0, CHUNKS)
    places = stats_ptr + row * num_chunks + chunks
    tops = tl.load(places, mask=chunks < num_chunks, other=float("-inf"))
    sums = tl.load(places + num_rows * num_chunks, mask=chunks < num_chunks, other=0.0)
    top = tl.max(tops, 0)
    return top, tl.where(sums == 0.0, 0.0, sums * tl.exp(tops - top))


@triton.jit
def store_result(
    token, row, logits_ptr, logits_stride, temperature, raw_ptr, tokens_ptr, logprobs_ptr, num_rows, num_chunks,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """The token and its log-probability under the logits as they were given."""
    top, masses = merge(raw_ptr, row, num_rows, num_chunks, CHUNKS)
    chosen = tl.div_rn(tl.load(logits_ptr + row * logits_stride + token), temperature)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, chosen - (top + tl.log(tl.sum(masses, 0))))


@triton.jit
def scan_kernel(
    logits_ptr,
    logits_stride,
    draws_ptr,
    seen_ptr,  # [., V] uint8 or None
    seen_stride,
    slots_ptr,
    ends_ptr,  # [num_ends] int64 or None
    num_ends,
    min_new_tokens,
    penalty,
    temperature,
    raw_ptr,  # [2, S, C]: maxima and sums of the logits over the temperature
    own_ptr,  # the same of what is drawn from, or None where that is no other or greedy
    adjusted_ptr,  # [S, V] what is drawn from, or None
    best_ptr,  # [2, S, C] int32: likeliest tokens and their logits in order; None where tokens are drawn
    vocab,
    num_rows,
    num_chunks,
    CHUNK: tl.constexpr,
):
    """Program 0 is the row, program 1 the chunk."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    is_token = tokens < vocab
    logits = tl.load(logits_ptr + row * logits_stride + tokens, mask=is_token, other=float("-inf"))
    place = row * num_chunks + tl.program_id(1)
    top, total = top_and_sum(tl.div_rn(logits, temperature))
    tl.store(raw_ptr + place, top)
    tl.store(raw_ptr + num_rows * num_chunks + place, total)
    if seen_ptr is not None:
        seen = tl.load(seen_ptr + tl.load(slots_ptr + row) * seen_stride + tokens, mask=is_token, other=0) != 0
        penalized = tl.where(logits > 0.0, tl.div_rn(logits, penalty), logits * penalty)
        logits = tl.where(seen, penalized, logits)
    if ends_ptr is not None:
        is_early = tl.load(draws_ptr + row) < min_new_tokens
        for index in range(num_ends):
            logits = tl.where((tokens == tl.load(ends_ptr + index)) & is_early, float("-inf"), logits)
    if best_ptr is not None:
        image = tl.where(is_token, ordered(logits), -2147483648)
        best = tl.max(image, 0)
        first = tl.min(tl.where((image == best) & is_token, tokens, vocab), 0)
        tl.store(best_ptr + place, first)
        tl.store(best_ptr + num_rows * num_chunks + place, best)
    if adjusted_ptr is not None:
        logits = tl.div_rn(logits, temperature)
        tl.store(adjusted_ptr + row * vocab + tokens, logits, mask=is_token)
        top, total = top_and_sum(logits)
        tl.store(own_ptr + place, top)
        tl.store(own_ptr + num_rows * num_chunks + place, total)


@triton.jit
def greedy_kernel(
    logits_ptr,
    logits_stride,
    raw_ptr,
    best_ptr,
    tokens_ptr,
    logprobs_ptr,
    vocab,
    num_rows,
    num_chunks,
    CHUNKS: tl.constexpr,
):
    """Program 0 is the row. The first of equally likely tokens."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    places = best_ptr + row * num_chunks + chunks
    firsts = tl.load(places, mask=chunks < num_chunks, other=vocab)
    images = tl.load(places + num_rows * num_chunks, mask=chunks < num_chunks, other=-2147483648)
    token = tl.min(tl.where(images == tl.max(images, 0), firsts, vocab), 0)
    store_result(
        token, row, logits_ptr, logits_stride, 1.0, raw_ptr, tokens_ptr, logprobs_ptr, num_rows, num_chunks, CHUNKS
    )


@triton.jit
def advance(parts_ptr, bases_ptr, row, amount, shift, num_chunks, COUNTS: tl.constexpr, CHUNKS: tl.constexpr,
            WAYS: tl.constexpr):  # fmt: skip
    """The largest threshold of the last pass that `amount` tokens (or that share of the mass) reach."""
    chunks = tl.arange(0, CHUNKS)
    ways = tl.arange(0, WAYS)
    places = parts_ptr + (row * num_chunks + chunks[:, None]) * WAYS + ways[None, :]
    sums = tl.sum(tl.load(places, mask=(chunks < num_chunks)[:, None], other=0.0), 0)
    goal = amount
    if not COUNTS:
        goal = amount * tl.sum(tl.where(ways == 0, sums, 0.0), 0)
    digit = tl.sum(((sums >= goal) & (ways > 0)).to(tl.int32), 0)
    return tl.load(bases_ptr + row) + (digit << shift)


@triton.jit
def narrow_kernel(
    adjusted_ptr,
    own_ptr,
    parts_in_ptr,  # [S, C, WAYS] of the last pass, None in the first
    bases_in_ptr,  # [S] int32 what thresholds are counted from
    floors_in_ptr,  # [S] int32 what earlier filters keep starts here
    parts_ptr,
    bases_ptr,
    floors_ptr,
    last_amount,  # of the filter that the last pass was for: k, or the share of the mass
    last_shift,
    shift,
    vocab,
    num_rows,
    num_chunks,
    LAST_COUNTS: tl.constexpr,
    COUNTS: tl.constexpr,  # top-k
    STARTS: tl.constexpr,  # the first pass of a filter
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Program 0 is the row, program 1 the chunk. Way 0 sums over all that earlier filters keep."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    base = tl.full([], -2147483648, tl.int32)
    floor = base
    if parts_in_ptr is not None:
        reached = advance(
            parts_in_ptr, bases_in_ptr, row, last_amount, last_shift, num_chunks, LAST_COUNTS, CHUNKS, WAYS
        )
        if STARTS:
            floor = reached
        else:
            base = reached
            floor = tl.load(floors_in_ptr + row)
    if chunk == 0:
        tl.store(bases_ptr + row, base)
        tl.store(floors_ptr + row, floor)
    top, _ = merge(own_ptr, row, num_rows, num_chunks, CHUNKS)
    ways = tl.arange(0, WAYS)
    thresholds = tl.where(ways == 0, floor, tl.maximum(base + (ways << shift), floor))
    sums = tl.zeros([WAYS], tl.float32)
    for start in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, vocab), TILE):
        tokens = start + tl.arange(0, TILE)
        is_token = tokens < vocab
        x = tl.load(adjusted_ptr + row * vocab + tokens, mask=is_token, other=float("-inf"))
        weight = is_token.to(tl.float32)
        if not COUNTS:
            weight = tl.where(x == float("-inf"), 0.0, tl.exp(x - top))
        sums += tl.sum(tl.where(ordered(x)[:, None] >= thresholds[None, :], weight[:, None], 0.0), 0)
    tl.store(parts_ptr + (row * num_chunks + chunk) * WAYS + ways, sums)


@triton.jit
def keep_kernel(
    adjusted_ptr,
    own_ptr,
    parts_ptr,  # of the last narrowing pass; None where there was none
    bases_ptr,
    last_amount,
    log_min_p,
    kept_ptr,  # [2, S, C]: the row's maximum and the sums over what is kept
    floors_ptr,  # [S] int32: the smallest logit that is kept
    vocab,
    num_rows,
    num_chunks,
    LAST_COUNTS: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Program 0 is the row, program 1 the chunk."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    top, _ = merge(own_ptr, row, num_rows, num_chunks, CHUNKS)
    floor = tl.full([], -2147483648, tl.int32)
    if parts_ptr is not None:
        floor = advance(parts_ptr, bases_ptr, row, last_amount, 0, num_chunks, LAST_COUNTS, CHUNKS, WAYS)
    if HAS_MIN_P:
        floor = tl.maximum(floor, ordered(top + log_min_p))
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(adjusted_ptr + row * vocab + tokens, mask=tokens < vocab, other=float("-inf"))
    masses = tl.where((ordered(x) >= floor) & (x != float("-inf")), tl.exp(x - top), 0.0)
    place = row * num_chunks + chunk
    tl.store(kept_ptr + place, top)
    tl.store(kept_ptr + num_rows * num_chunks + place, tl.sum(masses, 0))
    if chunk == 0:
        tl.store(floors_ptr + row, floor)


@triton.jit
def draw_kernel(
    logits_ptr,
    logits_stride,
    temperature,
    drawn_ptr,  # [S, V] what is drawn from: the logits, or what the scan wrote
    drawn_stride,
    drawn_temperature,
    raw_ptr,
    own_ptr,
    floors_ptr,  # None without filters
    keys_ptr,
    draws_ptr,
    tokens_ptr,
    logprobs_ptr,
    vocab,
    num_rows,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Program 0 is the row. Rounding may put the target beyond the last sum: the last that has any mass then."""
    row = tl.program_id(0).to(tl.int64)
    top, masses = merge(own_ptr, row, num_rows, num_chunks, CHUNKS)
    chunks = tl.arange(0, CHUNKS)
    total = tl.sum(masses, 0)
    target = noise(tl.load(keys_ptr + row), tl.load(draws_ptr + row)) * total
    first = tl.min(tl.where((tl.cumsum(masses, 0) > target) & (masses > 0.0), chunks, CHUNKS), 0)
    last = tl.max(tl.where(masses > 0.0, chunks, 0), 0)
    chunk = tl.where(first < CHUNKS, first, last)

    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    is_token = tokens < vocab
    x = tl.load(drawn_ptr + row * drawn_stride + tokens, mask=is_token, other=float("-inf"))
    x = tl.div_rn(x, drawn_temperature)
    is_kept = x != float("-inf")
    if floors_ptr is not None:
        is_kept = is_kept & (ordered(x) >= tl.load(floors_ptr + row))
    inside = tl.where(is_kept, tl.exp(x - top), 0.0)
    reached = tl.sum(tl.where(chunks < chunk, masses, 0.0), 0) + tl.cumsum(inside, 0)
    first = tl.min(tl.where((reached > target) & (inside > 0.0), tokens, vocab), 0)
    last = tl.max(tl.where(inside > 0.0, tokens, 0), 0)
    token = tl.where(first < vocab, first, last)
    # NaN, or nothing that may be drawn: the last token, as in the reference.
    token = tl.where(total > 0.0, token, vocab - 1)
    store_result(
        token, row, logits_ptr, logits_stride, temperature, raw_ptr, tokens_ptr, logprobs_ptr, num_rows, num_chunks,
        CHUNKS,
    )  # fmt: skip
