"""The product of exact mode in a Triton kernel: the result of a row depends only on that row, bit for bit.

    y[M, N] = x[M, K] W[K, N] (+ b[N])

One tile size for every M; K is processed from its start in steps of one size and never split; one compiled kernel for a
layer's prefill, decode and training. The number of rows is a run-time argument only, so that another number of rows
cannot compile to other instructions. Padding rows are zeros, and no row enters the sums of another.

Sums, softmaxes and norms along rows, which a library would split:

    sum, mean, logsumexp                 one number of each row
    _softmax, _log_softmax               along each row
    layer norm                           y = (x - mean) rstd gamma + beta,   rstd = 1 / sqrt(mean((x - mean)^2) + eps)
    rms norm                             y = x rstd gamma,                   rstd = 1 / sqrt(mean(x^2) + eps)

One program takes one row from its start, in chunks whose size depends only on the width. No argument of a kernel
depends on the number of rows, so that all rows are computed by the same instructions. In fp32.
"""

from typing import NamedTuple

import torch

from hybrid_engine.ops.dispatch import Launch, next_power_of_2, prepared, tl, triton
from hybrid_engine.ops.linears_kernels import multiply, weights_of

NUM_STAGES = 4
MAX_CHUNK = 4096
REDUCTIONS = ("sum", "mean", "logsumexp")
SOFTMAXES = ("_softmax", "_log_softmax")


class FixedTile(NamedTuple):
    """Tile sizes of a product, constant in the kernel."""

    rows: int
    columns: int
    depth: int  # step along K


# Tensor cores take 64 rows at a time. fp32 runs on FMAs, where padding rows would cost as much as others.
TILE_16_BITS, TILE_FP32 = FixedTile(64, 64, 64), FixedTile(32, 64, 32)


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
    bias = None if bias is None else bias.contiguous()
    launch = prepared(_prepare_product, tile_of(input.dtype), rows, weight, bias)
    launch(rows, weights_of(weight, bias), output, num_rows, width_in)
    return output


def _prepare_product(tile: FixedTile, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Launch:
    grid = (-(-rows.shape[0] // tile.rows), -(-weight.shape[1] // tile.columns))
    return Launch(fixed_product_kernel, grid, rows.device, TILE=tile, num_warps=4, num_stages=NUM_STAGES)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """`x` dense, at the alignment of new tensors: another alignment would compile to another kernel."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@triton.jit
def _row_sum(x_ptr, width, CHUNK: tl.constexpr):
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(0, width, CHUNK):
        place = start + tl.arange(0, CHUNK)
        total += tl.load(x_ptr + place, mask=place < width, other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def top_and_sum_of_row(x_ptr, width, divisor, CHUNK: tl.constexpr):
    """The largest of `x / divisor`, 0 if nothing is above -inf, and the sum of exp(x / divisor - largest)."""
    highest = tl.full([CHUNK], float("-inf"), tl.float32)
    for start in range(0, width, CHUNK):
        place = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + place, mask=place < width, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, tl.div_rn(x, divisor))
    top = tl.max(highest, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(0, width, CHUNK):
        place = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + place, mask=place < width, other=float("-inf")).to(tl.float32)
        total += tl.exp(tl.div_rn(x, divisor) - top)
    return top, tl.sum(total, 0)


@triton.jit
def reduce_rows_kernel(x_ptr, y_ptr, width, KIND: tl.constexpr, CHUNK: tl.constexpr):
    """One number of each row of x."""
    row = tl.program_id(0).to(tl.int64)
    if KIND == "logsumexp":
        top, total = top_and_sum_of_row(x_ptr + row * width, width, 1.0, CHUNK)
        result = top + tl.log(total)
    else:
        result = _row_sum(x_ptr + row * width, width, CHUNK)
        if KIND == "mean":
            result = result / width
    tl.store(y_ptr + row, result.to(y_ptr.dtype.element_ty))


@triton.jit
def softmax_rows_kernel(x_ptr, y_ptr, width, KIND: tl.constexpr, CHUNK: tl.constexpr):
    """The softmax of each row of x, or its logarithm."""
    row = tl.program_id(0).to(tl.int64) * width
    top, total = top_and_sum_of_row(x_ptr + row, width, 1.0, CHUNK)
    for start in range(0, width, CHUNK):
        place = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + row + place, mask=place < width, other=0.0).to(tl.float32) - top
        y = tl.exp(x) / total if KIND == "_softmax" else x - tl.log(total)
        tl.store(y_ptr + row + place, y.to(y_ptr.dtype.element_ty), mask=place < width)


@triton.jit
def norm_rows_kernel(
    x_ptr, gamma_ptr, beta_ptr, y_ptr, mean_ptr, rstd_ptr, width, eps, KIND: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """KIND "layer" or "rms"; gamma_ptr and beta_ptr may be None. Writes the statistics, which gradients need."""
    row = tl.program_id(0).to(tl.int64)
    mean = 0.0
    if KIND == "layer":
        mean = _row_sum(x_ptr + row * width, width, CHUNK) / width
        tl.store(mean_ptr + row, mean)
    squares = tl.zeros([CHUNK], tl.float32)
    for start in range(0, width, CHUNK):
        place = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + row * width + place, mask=place < width, other=0.0).to(tl.float32)
        centered = tl.where(place < width, x - mean, 0.0)
        squares += centered * centered
    rstd = tl.rsqrt(tl.sum(squares, 0) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, width, CHUNK):
        place = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + row * width + place, mask=place < width, other=0.0).to(tl.float32)
        y = (x - mean) * rstd
        if gamma_ptr is not None:
            y *= tl.load(gamma_ptr + place, mask=place < width, other=0.0).to(tl.float32)
        if beta_ptr is not None:
            y += tl.load(beta_ptr + place, mask=place < width, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * width + place, y.to(y_ptr.dtype.element_ty), mask=place < width)


def chunk_of(width: int) -> int:
    """Elements of a row that are processed at a time."""
    return min(MAX_CHUNK, next_power_of_2(width))


def reduce_rows(kind: str, input: torch.Tensor, keepdim: bool, dtype: torch.dtype) -> torch.Tensor:
    """`input [..., E]` -> `[...]` or `[..., 1]` in `dtype`; `kind` one of REDUCTIONS."""
    rows = aligned(input)
    output = input.new_empty((*input.shape[:-1], 1), dtype=dtype)
    _launch_rows(kind, rows, output)
    return output if keepdim else output.squeeze(-1)


def softmax_rows(kind: str, input: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`input [..., E]` -> the same shape in `dtype`; `kind` one of SOFTMAXES."""
    rows = aligned(input)
    output = rows.new_empty(rows.shape, dtype=dtype)
    _launch_rows(kind, rows, output)
    return output


def norm_rows(
    kind: str, input: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm of `input [..., E]`, and the means and rstds `[..., 1]` fp32; RMS norms do not set the means."""
    rows = aligned(input)
    output = torch.empty_like(rows)
    mean, rstd = (rows.new_empty((*rows.shape[:-1], 1), dtype=torch.float32) for _ in range(2))
    if rows.numel():
        launch = prepared(_prepare_rows, kind, rows.dtype, rows, gamma, beta)
        launch(rows, gamma, beta, output, mean, rstd, rows.shape[-1], float(eps))  # an integer would be a constant
    return output, mean, rstd


def _launch_rows(kind: str, rows: torch.Tensor, output: torch.Tensor) -> None:
    if rows.numel():
        prepared(_prepare_rows, kind, output.dtype, rows)(rows, output, rows.shape[-1])


def _prepare_rows(kind: str, dtype: torch.dtype, rows: torch.Tensor, *weights: torch.Tensor | None) -> Launch:
    """`dtype` is the output's; it and the weights are compiled for."""
    kernels = {**dict.fromkeys(REDUCTIONS, reduce_rows_kernel), **dict.fromkeys(SOFTMAXES, softmax_rows_kernel)}
    width, kernel = rows.shape[-1], kernels.get(kind, norm_rows_kernel)
    return Launch(kernel, (rows.numel() // width,), rows.device, KIND=kind, CHUNK=chunk_of(width), num_warps=4)
