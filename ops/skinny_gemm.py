"""Products of few rows: what the kernels of all linears share.

    y[M, N] = x[M, K] W[K, N]        M <= 64

At few rows a product runs at the speed of the memory that W streams from, so W is read once and everything
else bends to that: a tile takes BLOCK_N columns of W over BLOCK_K of K as the M side of `tl.dot`, and all
rows of x, padded to 16, 32 or 64, as its N side. W may lie either way round: its strides are arguments.
Sums are fp32, in an order that depends only on K, N, the dtype and the padded rows: a row alone gives the
bits that it gives in a batch of the same padding.

Up to NORM_ROWS rows the norm in front of a product runs inside it: every program computes the rows'
statistics for itself, which reads M K elements from L2 and saves a launch.
"""

from dataclasses import dataclass

import torch

from hybrid_engine.ops.dispatch import HAS_TRITON, IS_INTERPRETED, check_tensor, next_power_of_2, tl, triton
from hybrid_engine.ops.norm import normalize

# Above this many rows cuBLAS is the better product: the weights are no longer all that moves.
MAX_ROWS = 64
# Up to this many rows the norm is recomputed by each program of the product behind it.
NORM_ROWS = 4
# Elements of a row that the statistics take at a time: 4 rows x 1024 fp32 are 32 registers of 128 threads.
STATISTICS_BLOCK = 1024

# Sized for one H100: 132 SMs, 228 KB of shared memory each, 3.35 TB/s. At 0.8 us of latency that bandwidth needs
# 3.35e12 * 0.8e-6 = 2.7 MB in flight, 20 KB per SM. A program streams its columns in stages of up to 16 KB of weights
# and keeps 48 KB of them in flight, so 56 programs would do and 120 (nine in ten SMs) leave room for latency under
# load. Llama 8B in bf16: output and down projection 4096 / 32 = 128 programs of 0.26 and 0.9 MB, query-key-value
# 6144 / 32 = 192 of 0.26 MB, gate-and-up 14336 / 64 = 224 of 1 MB; two programs fit on an SM. Compiled for sm_90 by
# Triton 3.6 these take 56 to 96 registers, 74 to 82 KB of shared memory and 16-byte asynchronous copies, no spills.
STAGE_BYTES = 16 * 1024
IN_FLIGHT_BYTES = 48 * 1024
# At least so many stages, with shorter ones where the rows of x take the room.
MIN_STAGES = 4
MIN_PROGRAMS = 120
# Shared memory of a program at most, so that two fit on an SM.
SHARED_BYTES = 112 * 1024
# K is split only while each part still streams this much: 2.6 us of one program's 48 KB per 0.8 us, about what
# the launch that sums the parts costs.
SPLIT_BYTES = 160 * 1024
MAX_SPLITS = 8
# Tiles of columns to choose from, widest first. The more rows, the wider: each program reads all of x.
COLUMN_TILES = {16: (64, 32, 16), 32: (64, 32), 64: (64, 32)}


@dataclass(frozen=True)
class Tiles:
    """How a product is cut, for a launch."""

    rows: int  # M padded to 16, 32 or 64
    block_n: int
    block_k: int
    splits: int  # parts of K
    num_stages: int

    def meta(self) -> dict[str, int]:
        """Keywords of a kernel's launch."""
        return {
            "ROWS": self.rows,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "num_warps": 4,
            "num_stages": self.num_stages,
        }


def padded_rows(num_rows: int) -> int:
    """Rows of the tile that holds `num_rows`."""
    return max(16, next_power_of_2(num_rows))


def choose_tiles(
    num_rows: int, width_in: int, widths_out: tuple[int, ...], dtype: torch.dtype, *, num_weights=1, can_split=False
) -> Tiles:
    """Tiles of a product `[num_rows, width_in] x [width_in, each of widths_out]`.

    Args:
        widths_out: columns of the weights that one launch takes one after the other.
        num_weights: weights that one program reads side by side (2: gate and up).
        can_split: whether the caller sums parts of K.
    """
    rows, itemsize = padded_rows(num_rows), dtype.itemsize

    def programs(block_n: int) -> int:
        return sum(-(-width // block_n) for width in widths_out)

    choices = COLUMN_TILES[rows]
    block_n = next((choice for choice in choices if programs(choice) >= MIN_PROGRAMS), choices[-1])
    block_k = STAGE_BYTES // (num_weights * block_n * itemsize)
    # fp32 products run on FMAs, unrolled over the tile: longer tiles only lengthen the code.
    block_k = min(block_k, 64 if dtype == torch.float32 else 256, max(16, next_power_of_2(width_in)))
    splits = 1
    if can_split and programs(block_n) < MIN_PROGRAMS:
        longest = block_n * width_in * itemsize // SPLIT_BYTES
        splits = max(1, min(MAX_SPLITS, longest, -(-MIN_PROGRAMS // programs(block_n))))
    width = num_weights * block_n  # of W; the stage holds `rows` of x beside it
    while MIN_STAGES * (width + rows) * block_k * itemsize > SHARED_BYTES and block_k > 32:
        block_k //= 2
    wanted_stages = 1 + -(-IN_FLIGHT_BYTES // (width * block_k * itemsize))
    num_stages = min(wanted_stages, SHARED_BYTES // ((width + rows) * block_k * itemsize), 8)
    return Tiles(rows, block_n, block_k, splits, num_stages)


def check_linear(
    name: str, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, width_out: int | None = None
) -> None:
    """ValueError where `weight [in, out]` or `bias [out]` do not fit `input [N, in]`, before a kernel reads them."""
    check_tensor("input", input, shape=(None, None))
    check_tensor(f"{name} weight", weight, like=input, shape=(input.shape[1], width_out))
    if bias is not None:
        check_tensor(f"{name} bias", bias, like=input, shape=(weight.shape[1],), is_dense_last=True)


# The interpreter multiplies the bits of bf16 as integers.
UPCASTS = tl.constexpr(IS_INTERPRETED) if HAS_TRITON else IS_INTERPRETED


@triton.jit
def multiply(weights, rows, total):
    """`total [BLOCK_N, ROWS]` + weights x rows, in fp32; fp32 operands are not cut to tf32."""
    if UPCASTS:
        weights = weights.to(tl.float32)
        rows = rows.to(tl.float32)
    return tl.dot(weights, rows, total, input_precision="ieee")


@triton.jit
def load_rows(x_ptr, stride_m, stride_k, num_rows, k, width_in, ROWS: tl.constexpr):
    """All rows of x at `k [BLOCK_K]`: `[BLOCK_K, ROWS]`."""
    m = tl.arange(0, ROWS)
    mask = (k < width_in)[:, None] & (m < num_rows)[None, :]
    return tl.load(x_ptr + k[:, None] * stride_k + m[None, :] * stride_m, mask=mask, other=0.0)


@triton.jit
def load_weights(w_ptr, stride_k, stride_n, k, n, width_in, width_out):
    """Columns `n [BLOCK_N]` of W at `k [BLOCK_K]`: `[BLOCK_N, BLOCK_K]`. 64-bit offsets: an LM head may need them."""
    mask = (n < width_out)[:, None] & (k < width_in)[None, :]
    offsets = n.to(tl.int64)[:, None] * stride_n + k.to(tl.int64)[None, :] * stride_k
    return tl.load(w_ptr + offsets, mask=mask, other=0.0)


@triton.jit
def load_normed_rows(
    x_ptr,
    stride_m,
    stride_k,
    num_rows,
    k,
    width_in,
    gamma_ptr,
    beta_ptr,
    mean,
    rstd,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`load_rows`, normed with statistics `[ROWS]` unless NORM is "none"."""
    x = load_rows(x_ptr, stride_m, stride_k, num_rows, k, width_in, ROWS)
    if NORM != "none":
        gamma = tl.load(gamma_ptr + k, mask=k < width_in, other=0.0)[:, None]
        beta = None
        if beta_ptr is not None:
            beta = tl.load(beta_ptr + k, mask=k < width_in, other=0.0)[:, None]
        x = normalize(x.to(tl.float32), mean[None, :], rstd[None, :], gamma, beta, NORM, x_ptr.dtype.element_ty)
    return x


@triton.jit
def row_statistics(
    x_ptr,
    stride_m,
    stride_k,
    num_rows,
    width_in,
    eps,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Mean and 1 / deviation of at most 4 rows, as `[ROWS]`; zeros where NORM is "none".

    Always 4 rows, masked: a row's statistics do not depend on its company. Chunks are unrolled so that their
    loads overlap.
    """
    mean = tl.zeros([ROWS], tl.float32)
    rstd = tl.zeros([ROWS], tl.float32)
    if NORM != "none":
        m = tl.arange(0, 4)
        column = tl.arange(0, CHUNK)
        row_mean = tl.zeros([4], tl.float32)
        squares = tl.zeros([4, CHUNK], tl.float32)
        if NORM == "layer":
            total = tl.zeros([4, CHUNK], tl.float32)
            for chunk in tl.static_range(NUM_CHUNKS):
                k = chunk * CHUNK + column
                mask = (m < num_rows)[:, None] & (k < width_in)[None, :]
                x = tl.load(x_ptr + m[:, None] * stride_m + k[None, :] * stride_k, mask=mask, other=0.0)
                total += x.to(tl.float32)
            row_mean = tl.sum(total, axis=1) / width_in
        for chunk in tl.static_range(NUM_CHUNKS):
            k = chunk * CHUNK + column
            mask = (m < num_rows)[:, None] & (k < width_in)[None, :]
            x = tl.load(x_ptr + m[:, None] * stride_m + k[None, :] * stride_k, mask=mask, other=0.0)
            centered = tl.where(mask, x.to(tl.float32) - row_mean[:, None], 0.0)
            squares += centered * centered
        row_rstd = tl.rsqrt(tl.sum(squares, axis=1) / width_in + eps)
        is_row = tl.arange(0, ROWS)[:, None] == m[None, :]
        mean = tl.sum(tl.where(is_row, row_mean[None, :], 0.0), axis=1)
        rstd = tl.sum(tl.where(is_row, row_rstd[None, :], 0.0), axis=1)
    return mean, rstd


@triton.jit
def tile_product(
    x_ptr,
    stride_xm,
    stride_xk,
    num_rows,
    w_ptr,
    stride_wk,
    stride_wn,
    n,
    k_begin,
    k_end,
    width_in,
    width_out,
    gamma_ptr,
    beta_ptr,
    mean,
    rstd,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Columns `n` of norm(x) W over k in [k_begin, k_end): fp32 `[BLOCK_N, ROWS]`."""
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in range(k_begin, k_end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = load_weights(w_ptr, stride_wk, stride_wn, k, n, width_in, width_out)
        x = load_normed_rows(
            x_ptr, stride_xm, stride_xk, num_rows, k, width_in, gamma_ptr, beta_ptr, mean, rstd, NORM, ROWS
        )
        total = multiply(w, x, total)
    return total


@triton.jit
def add_bias(total, bias_ptr, n, width_out):
    """`total [BLOCK_N, ROWS]` plus the bias of its columns, which may be None."""
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=n < width_out, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit
def store_columns(y_ptr, stride_m, num_rows, total, n, width_out, ROWS: tl.constexpr):
    """Writes `total [BLOCK_N, ROWS]` to columns `n` of y, whose columns are dense."""
    m = tl.arange(0, ROWS)
    mask = (n < width_out)[:, None] & (m < num_rows)[None, :]
    tl.store(y_ptr + m[None, :] * stride_m + n[:, None], total.to(y_ptr.dtype.element_ty), mask=mask)


def statistics_meta(norm: str, width_in: int) -> dict[str, int | str]:
    """Keywords of a launch whose kernel may norm its rows."""
    chunk = min(STATISTICS_BLOCK, next_power_of_2(width_in))
    return {"NORM": norm, "NUM_CHUNKS": -(-width_in // chunk), "CHUNK": chunk}
