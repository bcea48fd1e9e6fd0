"""The Triton kernels of `SampleOp`; the maths is told in `sample.py`.

The first kernel reads the logits once, a chunk of a row per program, and leaves for each chunk the maximum, its
place and the sum of exponentials. The second has one program per row: it merges the chunks, and finds the drawn
token inside the one chunk where the cumulative distribution passes the noise. So logits are read once, and one
chunk twice: 4 V + 4 CHUNK bytes per row.

Under a filter the second kernel first searches the smallest logit that is kept, on the bits of fp32 in an order
that integers share, sixteen candidates at a time: eight passes over the row for top-k and eight for top-p, out of
the second-level cache, and two to draw. No sort, and no number of tokens that must fit anywhere.
"""

from hybrid_engine.ops.dispatch import tl, triton

CHUNK = 4096  # logits of one program of the first kernel
SEARCH_CHUNK = 1024  # logits compared with all candidates at once
CANDIDATES = 16  # per pass: four bits of the threshold
MAX_CHUNKS = 1024  # of a row, whose results one program merges


@triton.jit
def _mix(x):
    """splitmix64's finaliser on int64, which wraps; `&` makes the shifts logical."""
    x = x + (-7046029254386353131)
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * (-4658895280553007687)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * (-7723592293110705685)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _ordered(x):
    """int32 that compare as the fp32 `x` do; -0.0 counts as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _scaled(
    row_ptr,
    tokens,
    is_token,
    seen_ptr,
    ends_ptr,
    num_ends,
    is_early,
    penalty,
    temperature,
    HAS_PENALTY: tl.constexpr,
    HAS_ENDS: tl.constexpr,
):
    """The row's logits as they are reported and as they are drawn from, both over the temperature; -inf beyond V."""
    raw = tl.load(row_ptr + tokens, mask=is_token, other=float("-inf"))
    drawn = raw
    if HAS_PENALTY:
        seen = tl.load(seen_ptr + tokens, mask=is_token, other=0) != 0
        drawn = tl.where(seen, tl.where(raw > 0, raw / penalty, raw * penalty), raw)
    if HAS_ENDS:
        for index in range(num_ends):
            end = tl.load(ends_ptr + index)
            drawn = tl.where((tokens == end) & is_early, float("-inf"), drawn)
    return raw / temperature, drawn / temperature


@triton.jit
def scan_kernel(
    logits_ptr,
    logits_row,
    draws_ptr,
    seen_ptr,
    seen_row,
    slots_ptr,
    ends_ptr,
    num_ends,
    min_new_tokens,
    penalty,
    temperature,
    floats_ptr,  # [S, 4, num_chunks] fp32: maximum and sum of the reported, maximum and sum of the drawn logits
    places_ptr,  # [S, num_chunks] int64: token of the drawn maximum
    vocab,
    num_chunks,
    HAS_PENALTY: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    slot = row
    if HAS_PENALTY:
        slot = tl.load(slots_ptr + row)
    is_early = tl.load(draws_ptr + row) < min_new_tokens
    raw, drawn = _scaled(
        logits_ptr + row * logits_row, tokens, tokens < vocab, seen_ptr + slot * seen_row, ends_ptr, num_ends,
        is_early, penalty, temperature, HAS_PENALTY, HAS_ENDS,
    )  # fmt: skip
    floats = floats_ptr + row * 4 * num_chunks + chunk
    top = tl.max(raw, axis=0)
    # A chunk of nothing but -inf has no sum; NaN goes through.
    tl.store(floats, top)
    tl.store(floats + num_chunks, tl.sum(tl.where(raw == float("-inf"), 0.0, tl.exp(raw - top)), axis=0))
    top = tl.max(drawn, axis=0)
    place = tl.min(tl.where(drawn == top, tokens, vocab - 1), axis=0)
    tl.store(floats + 2 * num_chunks, top)
    tl.store(floats + 3 * num_chunks, tl.sum(tl.where(drawn == float("-inf"), 0.0, tl.exp(drawn - top)), axis=0))
    tl.store(places_ptr + row * num_chunks + chunk, place.to(tl.int64))


@triton.jit
def _search(
    row_ptr,
    seen_ptr,
    ends_ptr,
    num_ends,
    is_early,
    penalty,
    temperature,
    vocab,
    top,
    floor,
    wanted,
    COUNTS: tl.constexpr,
    HAS_PENALTY: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    SEARCH_CHUNK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The largest key that tokens of at least `wanted` number (or mass) reach, of those whose key reaches `floor`."""
    lowest = tl.full([], -2147483648, tl.int64)
    candidates = tl.arange(0, CANDIDATES)
    for digit in range(8):
        step = tl.full([], 1, tl.int64) << (28 - 4 * digit)
        keys = lowest + candidates.to(tl.int64) * step  # [CANDIDATES]
        reached = tl.zeros([CANDIDATES], tl.float32)
        for start in range(0, vocab, SEARCH_CHUNK):
            tokens = start + tl.arange(0, SEARCH_CHUNK)
            is_token = tokens < vocab
            _, drawn = _scaled(
                row_ptr, tokens, is_token, seen_ptr, ends_ptr, num_ends, is_early, penalty, temperature,
                HAS_PENALTY, HAS_ENDS,
            )  # fmt: skip
            key = _ordered(drawn).to(tl.int64)
            amount = tl.full([SEARCH_CHUNK], 1.0, tl.float32) if COUNTS else tl.exp(drawn - top)
            amount = tl.where(is_token & (key >= floor), amount, 0.0)
            reached += tl.sum(tl.where(key[:, None] >= keys[None, :], amount[:, None], 0.0), axis=0)
        best = tl.max(tl.where(reached >= wanted, candidates, 0), axis=0)
        lowest = lowest + best.to(tl.int64) * step
    return lowest


@triton.jit
def draw_kernel(
    logits_ptr,
    logits_row,
    keys_ptr,
    draws_ptr,
    seen_ptr,
    seen_row,
    slots_ptr,
    ends_ptr,
    num_ends,
    min_new_tokens,
    penalty,
    temperature,
    floats_ptr,
    places_ptr,
    tokens_ptr,  # [S] int64
    logprobs_ptr,  # [S] fp32
    vocab,
    num_chunks,
    top_k,
    top_p,
    log_min_p,
    DO_SAMPLE: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    HAS_PENALTY: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    SEARCH_CHUNK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, NUM_CHUNKS)
    is_chunk = chunks < num_chunks
    floats = floats_ptr + row * 4 * num_chunks + chunks
    raw_tops = tl.load(floats, mask=is_chunk, other=float("-inf"))
    raw_sums = tl.load(floats + num_chunks, mask=is_chunk, other=0.0)
    tops = tl.load(floats + 2 * num_chunks, mask=is_chunk, other=float("-inf"))
    sums = tl.load(floats + 3 * num_chunks, mask=is_chunk, other=0.0)
    places = tl.load(places_ptr + row * num_chunks + chunks, mask=is_chunk, other=0)
    raw_top = tl.max(raw_tops, axis=0)
    lse = raw_top + tl.log(tl.sum(raw_sums * tl.exp(raw_tops - raw_top), axis=0))
    top = tl.max(tops, axis=0)
    first_chunk = tl.min(tl.where((tops == top) & is_chunk, chunks, NUM_CHUNKS - 1), axis=0)
    token = tl.sum(tl.where(chunks == first_chunk, places, 0), axis=0)

    row_ptr = logits_ptr + row * logits_row
    if DO_SAMPLE:
        draw = tl.load(draws_ptr + row)
        bits = _mix(_mix(tl.load(keys_ptr + row)) ^ draw)
        noise = (((bits >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16).to(tl.float32)
        is_early = draw < min_new_tokens
        slot = row
        if HAS_PENALTY:
            slot = tl.load(slots_ptr + row)
        row_seen = seen_ptr + slot * seen_row
        if HAS_TOP_K or HAS_TOP_P or HAS_MIN_P:
            floor = tl.full([], -2147483648, tl.int64)
            if HAS_TOP_K:
                floor = _search(
                    row_ptr, row_seen, ends_ptr, num_ends, is_early, penalty, temperature, vocab, top, floor,
                    top_k, True, HAS_PENALTY, HAS_ENDS, SEARCH_CHUNK, CANDIDATES,
                )  # fmt: skip
            if HAS_TOP_P:
                considered = tl.zeros([], tl.float32)
                for start in range(0, vocab, SEARCH_CHUNK):
                    tokens = start + tl.arange(0, SEARCH_CHUNK)
                    _, drawn = _scaled(
                        row_ptr, tokens, tokens < vocab, row_seen, ends_ptr, num_ends, is_early, penalty,
                        temperature, HAS_PENALTY, HAS_ENDS,
                    )  # fmt: skip
                    is_kept = (tokens < vocab) & (_ordered(drawn).to(tl.int64) >= floor)
                    considered += tl.sum(tl.where(is_kept, tl.exp(drawn - top), 0.0), axis=0)
                nucleus = _search(
                    row_ptr, row_seen, ends_ptr, num_ends, is_early, penalty, temperature, vocab, top, floor,
                    top_p * considered, False, HAS_PENALTY, HAS_ENDS, SEARCH_CHUNK, CANDIDATES,
                )  # fmt: skip
                floor = tl.maximum(floor, nucleus)
            if HAS_MIN_P:
                floor = tl.maximum(floor, _ordered(top + log_min_p).to(tl.int64))
            floor = tl.minimum(floor, _ordered(top).to(tl.int64))  # the likeliest token always stays
            kept = tl.zeros([], tl.float32)
            for start in range(0, vocab, SEARCH_CHUNK):
                tokens = start + tl.arange(0, SEARCH_CHUNK)
                _, drawn = _scaled(
                    row_ptr, tokens, tokens < vocab, row_seen, ends_ptr, num_ends, is_early, penalty, temperature,
                    HAS_PENALTY, HAS_ENDS,
                )  # fmt: skip
                is_kept = (tokens < vocab) & (_ordered(drawn).to(tl.int64) >= floor)
                kept += tl.sum(tl.where(is_kept, tl.exp(drawn - top), 0.0), axis=0)
            target = noise * kept
            before = tl.zeros([], tl.float32)
            found = tl.full([], -1, tl.int64)
            last = token
            for start in range(0, vocab, SEARCH_CHUNK):
                tokens = start + tl.arange(0, SEARCH_CHUNK)
                _, drawn = _scaled(
                    row_ptr, tokens, tokens < vocab, row_seen, ends_ptr, num_ends, is_early, penalty, temperature,
                    HAS_PENALTY, HAS_ENDS,
                )  # fmt: skip
                is_kept = (tokens < vocab) & (_ordered(drawn).to(tl.int64) >= floor)
                mass = tl.where(is_kept, tl.exp(drawn - top), 0.0)
                cdf = before + tl.cumsum(mass, axis=0)
                here = tl.min(tl.where((cdf > target) & (mass > 0), tokens, vocab), axis=0).to(tl.int64)
                found = tl.where((found < 0) & (here < vocab), here, found)
                latest = tl.max(tl.where(mass > 0, tokens, -1), axis=0).to(tl.int64)
                last = tl.where(latest >= 0, latest, last)
                before += tl.sum(mass, axis=0)
            token = tl.where(found >= 0, found, last)  # rounding may leave the target at the very end
        else:
            masses = tl.where(sums > 0, sums * tl.exp(tops - top), 0.0)
            cdf = tl.cumsum(masses, axis=0)
            target = noise * tl.sum(masses, axis=0)
            chosen = tl.min(tl.where((cdf > target) & (masses > 0), chunks, NUM_CHUNKS), axis=0)
            last_chunk = tl.max(tl.where(masses > 0, chunks, 0), axis=0)
            chosen = tl.where(chosen < NUM_CHUNKS, chosen, last_chunk)
            before = tl.sum(tl.where(chunks < chosen, masses, 0.0), axis=0)
            tokens = chosen * CHUNK + tl.arange(0, CHUNK)
            _, drawn = _scaled(
                row_ptr, tokens, tokens < vocab, row_seen, ends_ptr, num_ends, is_early, penalty, temperature,
                HAS_PENALTY, HAS_ENDS,
            )  # fmt: skip
            mass = tl.where(tokens < vocab, tl.exp(drawn - top), 0.0)
            inner = before + tl.cumsum(mass, axis=0)
            here = tl.min(tl.where((inner > target) & (mass > 0), tokens, vocab), axis=0)
            latest = tl.max(tl.where(mass > 0, tokens, 0), axis=0)
            token = tl.where(here < vocab, here, latest).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    tl.store(tokens_ptr + row, token)
    tl.store(logprobs_ptr + row, tl.load(row_ptr + token) / temperature - lse)
