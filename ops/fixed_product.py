"""The product of exact mode in a Triton kernel: the result of a row depends only on that row, bit for bit.

    y[M, N] = x[M, K] W[K, N] (+ b[N])

One tile size for every M; K is processed from its start in steps of one size and never split; one compiled kernel for a
layer's prefill, decode and training. The number of rows is a run-time argument only, so that another number of rows
cannot compile to other instructions. Padding rows are zeros, and no row enters the sums of another.
"""

from typing import NamedTuple

import torch

from hybrid_engine.ops.dispatch import launch, tl, triton
from hybrid_engine.ops.skinny_gemm import Weights, multiply, weights_of


class FixedTile(NamedTuple):
    """Tile sizes of a product, constant in the kernel."""

    rows: int
    columns: int
    depth: int  # step along K


# Tensor cores take 64 rows at a time. fp32 runs on FMAs, where padding rows would cost as much as others.
TILE_16_BITS, TILE_FP32 = FixedTile(64, 64, 64), FixedTile(32, 64, 32)
NUM_STAGES = 4


@triton.jit(do_not_specialize=["num_rows"])
def fixed_product_kernel(x_ptr, w, y_ptr, num_rows, width_in, TILE: tl.constexpr):
    """One tile of y; program 0 is the tile of rows, program 1 the tile of columns. x and y are dense."""
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    DEPTH: tl.constexpr = TILE.depth
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = (m < num_rows)[:, None]
    is_column = (n < w.width)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, width_in, DEPTH):
        k = start + tl.arange(0, DEPTH)
        rows = tl.load(x_ptr + m[:, None] * width_in + k[None, :], mask=is_row & (k < width_in)[None, :], other=0.0)
        places = k.to(tl.int64)[:, None] * w.stride_k + n[None, :] * w.stride_n
        columns = tl.load(w.ptr + places, mask=(k < width_in)[:, None] & is_column, other=0.0)
        total = multiply(rows, columns, total)
    if w.bias_ptr is not None:
        total += tl.load(w.bias_ptr + n, mask=n < w.width, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + m[:, None] * w.width + n[None, :], total.to(y_ptr.dtype.element_ty), mask=is_row & is_column)


def tile_of(dtype: torch.dtype) -> FixedTile:
    """The single tile size of all products in `dtype`."""
    return TILE_FP32 if dtype == torch.float32 else TILE_16_BITS


def fixed_product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`input [M, K]`, `weight [K, N]` with any strides, `bias [N]` or None -> `[M, N]`; summed in fp32."""
    rows, (num_rows, width_in) = aligned(input), input.shape
    output = input.new_empty(num_rows, weight.shape[1])
    if not output.numel():
        return output
    tile, weights = tile_of(input.dtype), weights_of(weight, None if bias is None else bias.contiguous())
    _launch_product(rows, weights, output, tile, width_in)
    return output


def _launch_product(rows: torch.Tensor, weights: Weights, output: torch.Tensor, tile: FixedTile, width_in: int) -> None:
    grid = (-(-rows.shape[0] // tile.rows), -(-weights.width // tile.columns))
    launch(
        fixed_product_kernel, grid, rows, weights, output, rows.shape[0], width_in,
        device=rows.device, TILE=tile, num_warps=4, num_stages=NUM_STAGES,
    )  # fmt: skip


def aligned(x: torch.Tensor) -> torch.Tensor:
    """`x` dense, at the alignment of new tensors: another alignment would compile to another kernel."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
