"""Triton kernels for the tiles of a head's logits: logits stay in registers, and only sums or gradients reach memory.

`sums_kernel` reads the head once: each program processes a run of columns for some tokens and writes their sums, which
`merged` combines. N E + V E elements are read for each block of rows, and 4 numbers per token and run are written.
`gradient_kernel` computes a tile's products again and writes their gradient, `[N, columns]` in the weights' dtype. The
backward pass multiplies it with the hidden states and the head. Products are summed in fp32 and, as in the sampler,
never rounded to 16 bits.

N tokens, E hidden size, V columns of the head.
"""

from typing import Any, NamedTuple

import torch

from hybrid_engine.ops.dispatch import Launch, next_power_of_2, prepared, tl, triton
from hybrid_engine.ops.linear_log_prob_tiles import Head, LogitShape, Sums, Tile
from hybrid_engine.ops.linears_kernels import ProductWeights, multiply, weights_of

LEAST_ROWS = 16  # minimum M of a tensor core's operand
NUM_PROGRAMS = 264  # two for each multiprocessor of an H100
LEAST_RUN = 1024  # minimum columns per program, so that its sums are few in comparison


class ProductTile(NamedTuple):
    """Tile sizes of a product, constant in the kernels."""

    rows: int
    columns: int
    depth: int  # step along E


class ShapeArgs(NamedTuple):
    """`LogitShape` for a kernel: the factors of the products before and after a cap."""

    scale: float
    softcap: float  # 0: no cap
    inverse_temperature: float


class SumPointers(NamedTuple):
    """`Sums` of each run of columns, `[P, N]` each."""

    base_ptr: Any
    total_ptr: Any
    chosen_ptr: Any
    weighted_ptr: Any


class RowPointers(NamedTuple):
    """The inputs of a token's gradient, `[N]` each; the last two are None without an entropy."""

    places_ptr: Any
    log_total_ptr: Any
    above_ptr: Any
    above_entropy_ptr: Any
    entropy_ptr: Any


@triton.jit
def logits_of_tile(x_ptr, w, shape, m, n, num_rows, width_in, HAS_SOFTCAP: tl.constexpr, TILE: tl.constexpr):
    """`[ROWS, COLUMNS]` fp32 at the rows `m` and the columns `n`; values outside of the ranges are arbitrary."""
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    DEPTH: tl.constexpr = TILE.depth
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, width_in, DEPTH):
        k = start + tl.arange(0, DEPTH)
        is_inside = k < width_in
        rows = tl.load(
            x_ptr + m.to(tl.int64)[:, None] * width_in + k[None, :],
            mask=(m < num_rows)[:, None] & is_inside[None, :],
            other=0.0,
        )
        columns = tl.load(
            w.ptr + k.to(tl.int64)[:, None] * w.stride_k + n.to(tl.int64)[None, :] * w.stride_n,
            mask=is_inside[:, None] & (n < w.width)[None, :],
            other=0.0,
        )
        total = multiply(rows, columns, total)
    if w.bias_ptr is not None:
        total += tl.load(w.bias_ptr + n, mask=n < w.width, other=0.0).to(tl.float32)[None, :]
    total *= shape.scale
    if HAS_SOFTCAP:
        # tanh by exponentials, available in every release of Triton: 1 - 2 / (exp(2x) + 1)
        total = shape.softcap * (1 - 2 / (tl.exp(2 * total / shape.softcap) + 1))
    total *= shape.inverse_temperature
    if w.bias_ptr is not None:
        total = tl.where(total < -1e30, -1e30, total)  # LEAST_LOGIT
    return total


@triton.jit
def sums_kernel(
    x_ptr, w, places_ptr, sums, shape, num_rows, width_in, run,
    HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program 0 is the block of rows, program 1 the run of columns."""
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = m < num_rows
    place = tl.load(places_ptr + m, mask=is_row, other=-1)
    base = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    chosen = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS], tl.float32)
    first = tl.program_id(1) * run
    for start in range(first, min(first + run, w.width), COLUMNS):
        n = start + tl.arange(0, COLUMNS)
        logits = logits_of_tile(x_ptr, w, shape, m, n, num_rows, width_in, HAS_SOFTCAP, TILE)
        chosen += tl.sum(tl.where((n[None, :] == place[:, None]) & (n < w.width)[None, :], logits, 0.0), 1)
        logits = tl.where((n < w.width)[None, :], logits, float("-inf"))
        raised = tl.maximum(base, tl.max(logits, 1))
        fading = tl.exp(base - raised)
        exps = tl.exp(logits - raised[:, None])
        if WITH_ENTROPY:
            lifted = tl.where(total > 0, (raised - base) * total, 0.0)
            distances = tl.where((n < w.width)[None, :], logits - raised[:, None], 0.0)
            weighted = (weighted - lifted) * fading + tl.sum(exps * distances, 1)
        total = total * fading + tl.sum(exps, 1)
        base = raised
    at = tl.program_id(1).to(tl.int64) * num_rows + m
    tl.store(sums.base_ptr + at, base, mask=is_row)
    tl.store(sums.total_ptr + at, total, mask=is_row)
    tl.store(sums.chosen_ptr + at, chosen, mask=is_row)
    tl.store(sums.weighted_ptr + at, weighted, mask=is_row)


@triton.jit
def gradient_kernel(
    x_ptr, w, gradient_ptr, rows, shape, num_rows, width_in,
    HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program 0 is the block of rows, program 1 the block of columns."""
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = m < num_rows
    logits = logits_of_tile(x_ptr, w, shape, m, n, num_rows, width_in, HAS_SOFTCAP, TILE)
    log_total = tl.load(rows.log_total_ptr + m, mask=is_row, other=0.0)
    above = tl.load(rows.above_ptr + m, mask=is_row, other=0.0)
    place = tl.load(rows.places_ptr + m, mask=is_row, other=-1)
    logprobs = logits - log_total[:, None]
    factor = above[:, None] + tl.zeros_like(logprobs)
    if WITH_ENTROPY:
        above_entropy = tl.load(rows.above_entropy_ptr + m, mask=is_row, other=0.0)
        entropy = tl.load(rows.entropy_ptr + m, mask=is_row, other=0.0)
        factor += above_entropy[:, None] * (logprobs + entropy[:, None])
    gradient = -tl.exp(logprobs) * factor + tl.where(n[None, :] == place[:, None], above[:, None], 0.0)
    gradient *= shape.scale * shape.inverse_temperature
    if HAS_SOFTCAP:
        capped = logits / (shape.inverse_temperature * shape.softcap)
        gradient *= 1 - capped * capped
    at = m.to(tl.int64)[:, None] * w.width + n[None, :]
    is_inside = is_row[:, None] & (n < w.width)[None, :]
    tl.store(gradient_ptr + at, gradient.to(gradient_ptr.dtype.element_ty), mask=is_inside)


def tile_of(dtype: torch.dtype, num_rows: int) -> ProductTile:
    """Tile sizes. Tensor cores take 16 bits; fp32 runs on FMAs, where loads cost less than multiplications."""
    most = 64 if dtype == torch.float32 else 128
    rows = min(most, max(LEAST_ROWS, next_power_of_2(num_rows)))
    return ProductTile(rows, most, 32 if dtype == torch.float32 else 64)


def num_warps(tile: ProductTile) -> int:
    """Number of warps with which the accumulators of a tile take at most 64 registers per thread."""
    return max(4, tile.rows * tile.columns // (64 * 32))


def partial_sums(hidden: torch.Tensor, head: Head, places: torch.Tensor, with_entropy: bool) -> Sums:
    """`Sums` of runs of columns, `[P, N]` each.

    Args:
        hidden: `[N, E]`.
        places: `[N]` int64, the targets counted from the first row of the head.
    """
    (num_rows, width_in), weights, hidden = hidden.shape, weights_of_head(head), hidden.contiguous()
    has_softcap = head.shape.softcap is not None
    launch, num_runs, run = prepared(_prepare_sums, has_softcap, with_entropy, hidden, *head[:2], places)
    sums = Sums(*hidden.new_empty(len(Sums._fields), num_runs, num_rows, dtype=torch.float32))
    if num_rows:
        launch(hidden, weights, places, SumPointers(*sums), shape_args(head.shape), num_rows, width_in, run)
    return sums


def _prepare_sums(
    has_softcap: bool,
    with_entropy: bool,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    places: torch.Tensor,
) -> tuple[Launch, int, int]:
    """The launch, the number of runs of columns, and the columns of each."""
    num_rows, num_columns = len(hidden), len(weight)
    tile = tile_of(hidden.dtype, num_rows)
    num_blocks = -(-num_rows // tile.rows)
    wanted = max(1, NUM_PROGRAMS // max(num_blocks, 1))
    run = max(LEAST_RUN, -(-num_columns // wanted))
    run = -(-run // tile.columns) * tile.columns
    num_runs = -(-num_columns // run)
    launch = Launch(
        sums_kernel, (num_blocks, num_runs), hidden.device, HAS_SOFTCAP=has_softcap, WITH_ENTROPY=with_entropy,
        TILE=tile, num_warps=num_warps(tile), num_stages=3,
    )  # fmt: skip
    return launch, num_runs, run


def gradient_of_products(
    tile: Head,
    hidden: torch.Tensor,
    places: torch.Tensor,
    log_total: torch.Tensor,
    above: torch.Tensor,
    of_entropy: tuple[torch.Tensor, torch.Tensor] | None,
    kept: Tile | None = None,
) -> torch.Tensor:
    """`linear_log_prob_tiles.gradient_of_products` in a kernel; it does not use tiles kept from the forward pass."""
    assert kept is None
    (num_rows, width_in), weights, hidden = hidden.shape, weights_of_head(tile), hidden.contiguous()
    gradient = hidden.new_empty(num_rows, weights.width)
    rows = RowPointers(
        places,
        log_total,
        above.contiguous(),
        *((None, None) if of_entropy is None else (x.contiguous() for x in of_entropy)),
    )
    if num_rows:
        launch = prepared(_prepare_gradient, tile.shape.softcap is not None, hidden, *tile[:2], *rows)
        launch(hidden, weights, gradient, rows, shape_args(tile.shape), num_rows, width_in)
    return gradient


def _prepare_gradient(
    has_softcap: bool,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *rows: torch.Tensor | None,  # of RowPointers
) -> Launch:
    num_rows, has_entropy = len(hidden), rows[-1] is not None
    cut = tile_of(hidden.dtype, num_rows)
    return Launch(
        gradient_kernel, (-(-num_rows // cut.rows), -(-len(weight) // cut.columns)), hidden.device,
        HAS_SOFTCAP=has_softcap, WITH_ENTROPY=has_entropy, TILE=cut, num_warps=num_warps(cut), num_stages=3,
    )  # fmt: skip


def weights_of_head(head: Head) -> ProductWeights:
    """The head's weight as `[E, V]`, and its bias, for a kernel."""
    return weights_of(head.weight.t(), None if head.bias is None else head.bias.contiguous())


def shape_args(shape: LogitShape) -> ShapeArgs:
    """`shape` for a kernel."""
    return ShapeArgs(float(shape.scale), float(shape.softcap or 0.0), 1.0 / shape.temperature)
