"""The Triton kernels of `SampleOp` and `token_logprobs`; the maths is in `sample.py`.

S rows, V vocabulary, C chunks of a row.

The logits are cut into chunks, one program each, so that a single row keeps many programs busy too:

    scan     each chunk's maximum and sum of exponentials; the likeliest token of the chunk when greedy; under a
             filter its candidates: its `kept` largest values, and how often the smallest of them occurs
    draw     one program per row merges the chunks, finds the smallest logit that the filters keep, and looks for its
             token inside one chunk only
    greedy   one program per row merges the chunks

Two launches for any filters, which move 4 V + 16 C bytes per row and, to draw, one chunk again; 4 V more if adjusted
logits are drawn from (penalty, banned tokens). Nothing is sorted.

Each threshold is searched on the bits of fp32 in an order that integers share, 32 of them, with w = 1 for top-k and
exp(x - max) for top-p: the largest threshold that tokens of enough w reach. Every token that reaches the largest of all
chunks' smallest candidates is a candidate, or counted as one: down to there the candidates give the same result as the
whole row. That is enough for a top-k of at most `kept` and for at least as many tokens of a nucleus. A threshold below
it is searched in the whole row by the row's program, which reads it eight times: the slow path, for wide nuclei and a
large k. Sums in one fixed order never decrease when a term is added, so rounding cannot mislead the search. A draw
depends only on its row, bit for bit: no argument of a kernel depends on the number of rows, so that all rows are
computed by the same instructions.
"""

from typing import Any, NamedTuple

from hybrid_engine.ops.dispatch import tl, triton
from hybrid_engine.ops.fixed_product import top_and_sum_of_row

CHUNK = 4096  # logits of one program
TILE = 512  # logits compared with all thresholds at once when a row is searched
MAX_CHUNKS = 1024  # of a row; one program merges their results
# Candidates of a chunk under top-p and min-p; under top-k at most as many, the next power of two.
MAX_KEPT = 256
# Per row: 16 values, as many counts and as many masses for each of 256 threads.
MAX_CANDIDATES = 4096


class SampleTiles(NamedTuple):
    """Tile sizes of rows; all powers of two."""

    chunk: int  # logits of one program
    chunks: int  # C, padded
    kept: int  # candidates of a chunk
    tile: int  # logits compared with all thresholds at once


class Sizes(NamedTuple):
    """The sizes of the problem."""

    vocab: int
    num_chunks: int


class Logits(NamedTuple):
    """Rows `[S, V]` fp32 that are divided by the temperature."""

    ptr: Any
    stride: int
    temperature: float


class Adjustment(NamedTuple):
    """Changes of the logits before the temperature; pointers are None if unused."""

    penalty: float
    seen_ptr: Any  # [., V] uint8, row slots[s] for row s
    seen_stride: int
    slots_ptr: Any
    ends_ptr: Any  # [num_ends] int64, banned in the first `min_new_tokens` draws
    num_ends: int
    min_new_tokens: int


class Scanned(NamedTuple):
    """The outputs of the scan; None for those that are not read."""

    raw_ptr: Any  # [S, 2, C]: maxima and sums of the logits over the temperature
    own_ptr: Any  # the same for the logits that are drawn from
    adjusted_ptr: Any  # [S, V] the logits that are drawn from, if they differ from the logits over the temperature
    best_ptr: Any  # [S, 2, C] int32: likeliest tokens and their logits in order
    candidates_ptr: Any  # [S, C, kept]: those above the chunk's bound, then the bound
    numbers_ptr: Any  # [S, 3, C] int32: the bound in order, the number above it, the number equal to it


class Filters(NamedTuple):
    """Parameters of the filters; None if a filter is off."""

    top_k: float | None
    top_p: float | None
    log_min_p: float | None


class DrawBuffers(NamedTuple):
    """Seeds of each row's noise, `[S]` int64, and the outputs for its token and log-probability."""

    keys_ptr: Any
    draws_ptr: Any
    tokens_ptr: Any
    logprobs_ptr: Any


@triton.jit
def mix(x):
    """splitmix64's step on int64, which wraps; `&` makes the shifts logical."""
    x = x + (-7046029254386353131)
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * (-4658895280553007687)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * (-7723592293110705685)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def noise(key, draw):
    """The value of `keyed_uniform`, rounded to fp32."""
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
    """Maximum of x and the sum of exp(x - maximum), 0 if nothing is above -inf; NaN makes the sum NaN."""
    top = tl.max(x, 0)
    return top, tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - top)), 0)


@triton.jit
def merge(stats_ptr, row, sizes, CUT: tl.constexpr):
    """A row's maximum and its chunks' sums `[CUT.chunks]` relative to it, from `[S, 2, C]` maxima and sums."""
    chunks = tl.arange(0, CUT.chunks)
    places = stats_ptr + row * 2 * sizes.num_chunks + chunks
    tops = tl.load(places, mask=chunks < sizes.num_chunks, other=float("-inf"))
    sums = tl.load(places + sizes.num_chunks, mask=chunks < sizes.num_chunks, other=0.0)
    top = tl.max(tops, 0)
    return top, tl.where(sums == 0.0, 0.0, sums * tl.exp(tops - top))


@triton.jit
def store_result(token, row, logits, scanned, draw, sizes, CUT: tl.constexpr):
    """Stores the token and its log-probability under the unadjusted logits."""
    top, masses = merge(scanned.raw_ptr, row, sizes, CUT)
    chosen = tl.div_rn(tl.load(logits.ptr + row * logits.stride + token), logits.temperature)
    tl.store(draw.tokens_ptr + row, token.to(tl.int64))
    tl.store(draw.logprobs_ptr + row, chosen - (top + tl.log(tl.sum(masses, 0))))


@triton.jit
def store_stats(stats_ptr, row, chunk, x, sizes):
    """Stores a chunk's maximum and sum, in `[S, 2, C]`."""
    top, total = top_and_sum(x)
    place = stats_ptr + row * 2 * sizes.num_chunks + chunk
    tl.store(place, top)
    tl.store(place + sizes.num_chunks, total)


@triton.jit
def store_candidates(image, x, row, chunk, scanned, sizes, CUT: tl.constexpr):
    """Stores the chunk's largest values: all above its bound, at most `kept`, and how many equal the bound.

    The search refines the bound bit by bit until exactly `kept` values reach it. With many equal logits that never
    happens; then the number of values equal to the bound tells how many they are. `image` is `x` in order, with the
    least integer at places without a token.
    """
    bound = tl.full([], -2147483648, tl.int32)
    count = tl.sum((image > bound).to(tl.int32), 0)
    shift = tl.full([], 31, tl.int32)
    while (shift >= 0) & (count > CUT.kept):
        raised = bound ^ (tl.full([], 1, tl.int32) << shift)
        reached = tl.sum((image >= raised).to(tl.int32), 0)
        bound = tl.where(reached >= CUT.kept, raised, bound)
        count = tl.where(reached >= CUT.kept, reached, count)
        shift -= 1
    is_above = image > bound
    num_above = tl.sum(is_above.to(tl.int32), 0)
    target = scanned.candidates_ptr + (row * sizes.num_chunks + chunk) * CUT.kept
    tl.store(target + tl.cumsum(is_above.to(tl.int32), 0) - 1, x, mask=is_above)
    slots = tl.arange(0, CUT.kept)
    value = tl.where(bound < 0, bound ^ 0x7FFFFFFF, bound).to(tl.float32, bitcast=True)
    tl.store(target + slots, value, mask=slots >= num_above)
    place = scanned.numbers_ptr + row * 3 * sizes.num_chunks + chunk
    tl.store(place, bound)
    tl.store(place + sizes.num_chunks, num_above)
    # If the whole chunk is above the bound, only places without a token equal the least integer.
    num_equal = tl.sum((image == bound).to(tl.int32), 0)
    tl.store(place + 2 * sizes.num_chunks, tl.where(bound == -2147483648, 0, num_equal))


@triton.jit
def scan_kernel(logits, draws_ptr, adjustment, scanned, sizes, CUT: tl.constexpr):
    """Program 0 is the row, program 1 the chunk."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    tokens = chunk * CUT.chunk + tl.arange(0, CUT.chunk)
    is_token = tokens < sizes.vocab
    x = tl.load(logits.ptr + row * logits.stride + tokens, mask=is_token, other=float("-inf"))
    store_stats(scanned.raw_ptr, row, chunk, tl.div_rn(x, logits.temperature), sizes)
    if adjustment.seen_ptr is not None:
        seen_row = adjustment.seen_ptr + tl.load(adjustment.slots_ptr + row) * adjustment.seen_stride
        seen = tl.load(seen_row + tokens, mask=is_token, other=0) != 0
        penalized = tl.where(x > 0.0, tl.div_rn(x, adjustment.penalty), x * adjustment.penalty)
        x = tl.where(seen, penalized, x)
    if adjustment.ends_ptr is not None:
        is_early = tl.load(draws_ptr + row) < adjustment.min_new_tokens
        for index in range(adjustment.num_ends):
            x = tl.where((tokens == tl.load(adjustment.ends_ptr + index)) & is_early, float("-inf"), x)
    if scanned.best_ptr is not None:
        image = tl.where(is_token, ordered(x), -2147483648)
        best = tl.max(image, 0)
        first = tl.min(tl.where((image == best) & is_token, tokens, sizes.vocab), 0)
        place = scanned.best_ptr + row * 2 * sizes.num_chunks + chunk
        tl.store(place, first)
        tl.store(place + sizes.num_chunks, best)
    x = tl.div_rn(x, logits.temperature)
    if scanned.adjusted_ptr is not None:
        tl.store(scanned.adjusted_ptr + row * sizes.vocab + tokens, x, mask=is_token)
        store_stats(scanned.own_ptr, row, chunk, x, sizes)
    if scanned.candidates_ptr is not None:
        store_candidates(tl.where(is_token, ordered(x), -2147483648), x, row, chunk, scanned, sizes, CUT)


@triton.jit
def greedy_kernel(logits, scanned, draw, sizes, CUT: tl.constexpr):
    """Program 0 is the row. Takes the first of equally likely tokens."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CUT.chunks)
    places = scanned.best_ptr + row * 2 * sizes.num_chunks + chunks
    firsts = tl.load(places, mask=chunks < sizes.num_chunks, other=sizes.vocab)
    images = tl.load(places + sizes.num_chunks, mask=chunks < sizes.num_chunks, other=-2147483648)
    token = tl.min(tl.where(images == tl.max(images, 0), firsts, sizes.vocab), 0)
    store_result(token, row, logits, scanned, draw, sizes, CUT)


@triton.jit
def search_candidates(image, weights, goal):
    """The largest threshold that candidates of total weight `goal` reach."""
    bound = tl.full([], -2147483648, tl.int32)
    for step in range(32):
        raised = bound ^ (tl.full([], 1, tl.int32) << (31 - step))
        bound = tl.where(tl.sum(tl.where(image >= raised, weights, 0.0)) >= goal, raised, bound)
    return bound


@triton.jit
def search_row(drawn, row, floor, top, amount, sizes, COUNTS: tl.constexpr, CUT: tl.constexpr):
    """The largest threshold reached by `amount` tokens of the row, or by that share of the mass from `floor` on.

    Finds four bits in each pass over the row, with 16 thresholds at once; the first of them sums all from `floor` on.
    """
    WAYS: tl.constexpr = 16
    TILE: tl.constexpr = CUT.tile
    ways = tl.arange(0, WAYS)
    base = tl.full([], -2147483648, tl.int32)
    for step in range(8):
        thresholds = base + (ways << (28 - 4 * step))
        thresholds = tl.where(ways == 0, floor, tl.maximum(thresholds, floor))
        sums = tl.zeros([TILE, WAYS], tl.float32)
        for start in tl.range(0, sizes.vocab, TILE, num_stages=4):
            tokens = start + tl.arange(0, TILE)
            is_token = tokens < sizes.vocab
            x = tl.load(drawn.ptr + row * drawn.stride + tokens, mask=is_token, other=float("-inf"))
            x = tl.div_rn(x, drawn.temperature)
            weights = is_token.to(tl.float32)
            if not COUNTS:
                weights = tl.where(x == float("-inf"), 0.0, tl.exp(x - top))
            sums += tl.where(ordered(x)[:, None] >= thresholds[None, :], weights[:, None], 0.0)
        reached = tl.sum(sums, 0)
        goal = amount
        if not COUNTS:
            goal = amount * tl.sum(tl.where(ways == 0, reached, 0.0), 0)
        base += tl.sum(((reached >= goal) & (ways > 0)).to(tl.int32), 0) << (28 - 4 * step)
    return base


@triton.jit
def load_kept(drawn, row, chunk, floor, top, sizes, CUT: tl.constexpr):
    """Tokens of a chunk and their masses, 0 for those below `floor`."""
    tokens = chunk * CUT.chunk + tl.arange(0, CUT.chunk)
    x = tl.load(drawn.ptr + row * drawn.stride + tokens, mask=tokens < sizes.vocab, other=float("-inf"))
    x = tl.div_rn(x, drawn.temperature)
    return tokens, tl.where((ordered(x) >= floor) & (x != float("-inf")), tl.exp(x - top), 0.0)


@triton.jit
def apply_filters(drawn, row, top, masses, scanned, filters, sizes, CUT: tl.constexpr):
    """The smallest logit that is kept, in order, and each chunk's mass `[CUT.chunks]` of the kept tokens.

    `top` and `masses` are the row's without filters.
    """
    chunks = tl.arange(0, CUT.chunks)
    slots = tl.arange(0, CUT.kept)
    place = row * sizes.num_chunks + chunks
    numbers = scanned.numbers_ptr + row * 3 * sizes.num_chunks + chunks
    is_chunk = chunks < sizes.num_chunks
    # At or above this value the candidates represent the whole row.
    known = tl.max(tl.load(numbers, mask=is_chunk, other=-2147483648), 0)
    num_above = tl.load(numbers + sizes.num_chunks, mask=is_chunk, other=0)[:, None]
    num_equal = tl.load(numbers + 2 * sizes.num_chunks, mask=is_chunk, other=0)[:, None]
    values = tl.load(
        scanned.candidates_ptr + place[:, None] * CUT.kept + slots[None, :], mask=is_chunk[:, None], other=0.0
    )
    counts = tl.where(slots[None, :] < num_above, 1, tl.where(slots[None, :] == num_above, num_equal, 0))
    image = tl.where(counts > 0, ordered(values), -2147483648)
    counts = tl.where(image >= known, counts, 0).to(tl.float32)
    weights = tl.where((counts > 0.0) & (values != float("-inf")), counts * tl.exp(values - top), 0.0)
    floor = tl.full([], -2147483648, tl.int32)
    if filters.top_k is not None:
        if tl.sum(counts) >= filters.top_k:
            floor = search_candidates(image, counts, filters.top_k)
        else:
            floor = search_row(drawn, row, floor, top, filters.top_k, sizes, True, CUT)
    if filters.top_p is not None:
        total = tl.sum(masses, 0)
        is_known = (floor == -2147483648) & (tl.sum(weights) >= filters.top_p * total)
        if floor >= known:
            weights = tl.where(image >= floor, weights, 0.0)
            total = tl.sum(weights)
            is_known = floor >= known
        if is_known:
            floor = tl.maximum(floor, search_candidates(image, weights, filters.top_p * total))
        else:
            floor = tl.maximum(floor, search_row(drawn, row, floor, top, filters.top_p, sizes, False, CUT))
    if filters.log_min_p is not None:
        floor = tl.maximum(floor, ordered(top + filters.log_min_p))
    if floor >= known:
        masses = tl.sum(tl.where(image >= floor, weights, 0.0), 1)
    else:
        for chunk in range(sizes.num_chunks):
            _, kept = load_kept(drawn, row, chunk, floor, top, sizes, CUT)
            masses = tl.where(chunks == chunk, tl.sum(kept, 0), masses)
    return floor, masses


@triton.jit
def draw_kernel(logits, drawn, scanned, filters, draw, sizes, CUT: tl.constexpr):
    """Program 0 is the row. If rounding puts the target beyond the last sum, takes the last token that has any mass."""
    row = tl.program_id(0).to(tl.int64)
    top, masses = merge(scanned.own_ptr, row, sizes, CUT)
    unfiltered = tl.sum(masses, 0)
    floor = tl.full([], -2147483648, tl.int32)
    if scanned.candidates_ptr is not None:
        floor, masses = apply_filters(drawn, row, top, masses, scanned, filters, sizes, CUT)
    chunks = tl.arange(0, CUT.chunks)
    total = tl.sum(masses, 0)
    target = noise(tl.load(draw.keys_ptr + row), tl.load(draw.draws_ptr + row)) * total
    first = tl.min(tl.where((tl.cumsum(masses, 0) > target) & (masses > 0.0), chunks, CUT.chunks), 0)
    last = tl.max(tl.where(masses > 0.0, chunks, 0), 0)
    chunk = tl.where(first < CUT.chunks, first, last)

    tokens, inside = load_kept(drawn, row, chunk, floor, top, sizes, CUT)
    reached = tl.sum(tl.where(chunks < chunk, masses, 0.0), 0) + tl.cumsum(inside, 0)
    first = tl.min(tl.where((reached > target) & (inside > 0.0), tokens, sizes.vocab), 0)
    last = tl.max(tl.where(inside > 0.0, tokens, 0), 0)
    token = tl.where(first < sizes.vocab, first, last)
    # If values are NaN or no token may be drawn: the last token, as in the reference.
    token = tl.where((total > 0.0) & (unfiltered == unfiltered), token, sizes.vocab - 1)
    store_result(token, row, logits, scanned, draw, sizes, CUT)


@triton.jit
def logprob_kernel(logits_ptr, tokens_ptr, logprobs_ptr, lse_ptr, vocab, temperature, CHUNK: tl.constexpr):
    """For one row of dense logits: its token's log-probability, and logsumexp(logits / temperature)."""
    row = tl.program_id(0).to(tl.int64)
    top, total = top_and_sum_of_row(logits_ptr + row * vocab, vocab, temperature, CHUNK)
    lse = top + tl.log(total)
    chosen = tl.load(logits_ptr + row * vocab + tl.load(tokens_ptr + row))
    tl.store(logprobs_ptr + row, tl.div_rn(chosen, temperature) - lse)
    tl.store(lse_ptr + row, lse)
