"""Kernels of linears with few rows, and the functions, types and tile sizes that all products of few rows share.

    y[M, N] = x[M, K] W[K, N]        M <= 256 in 16 bits, 64 in fp32

With few rows a product is limited by the memory bandwidth for W, so W is read only once. A tile takes BLOCK_N columns
of W over BLOCK_K of K as the M side of `tl.dot`, and the rows of x as its N side: all of them, padded to 16, 32 or 64,
or beyond 64 tiles of 128, two of which are adjacent so that the second finds W in the second-level cache. W may be
stored in either order: its strides are arguments. Sums are fp32, in an order that depends only on K, N, the dtype and
the padded rows: a single row has the same bits as in a batch of the same padding.

Kernels take tuples of related arguments; Triton specializes on strides of 1 and pointers of None in them.
"""

import functools
from typing import Any, NamedTuple

import torch

from hybrid_engine.ops.dispatch import HAS_TRITON, IS_INTERPRETED, check_tensor, next_power_of_2, tl, triton

# With more rows cuBLAS is the better product, as the weights no longer dominate memory traffic. On an H100 a product of
# 16 bits is bound by its weights up to 990e12 / 3.35e12 = 296 rows, one of fp32, which runs on FMAs, up to 40.
MAX_ROWS, MAX_ROWS_FP32 = 256, 64
# With more rows than this, products in 16 bits take wide tiles.
FEW_ROWS = 64

# Chosen among 14 to 126 tilings of each product of a decode step of OPT-1.3B, Qwen2 0.5B and 1.5B and Llama 8B, at 1,
# 32 and 64 rows, on an H200 of 132 SMs, 228 KB of shared memory each (`benchmarks/tune_products.py`). A program streams
# 64 columns in stages of 16 KB of weights. A program alone on its SM keeps 96 KB of them in flight; each of two
# programs keeps as much as fits. Programs of 64 columns are faster than twice as many of 32 down to a quarter of the
# SMs, and splitting K into up to 8 parts is faster than both. In 16 bits weights are loaded by 16-byte asynchronous
# copies (`tests/tools/compile_gemm_kernels.py`).
NUM_SMS = 132
STAGE_BYTES = 16 * 1024
IN_FLIGHT_BYTES = 96 * 1024
# Minimum number of stages; they are shorter if the rows of x need the memory.
MIN_STAGES = 4
# Minimum number of programs: if K can be split or for fp32, which is bound by arithmetic; and for all others.
MIN_PROGRAMS, MIN_UNSPLIT_PROGRAMS = 96, 32
# Target number of programs when K is split: nine in ten SMs.
WANTED_PROGRAMS = 120
# Maximum shared memory of a program, so that two fit on an SM.
SHARED_BYTES = 112 * 1024
# K is split only while each part streams at least this much.
SPLIT_BYTES = 48 * 1024
MAX_SPLITS = 8
# Tiles of columns to choose from, widest first. More rows need wider tiles, as each program reads all of x.
COLUMN_TILES = {16: (64, 32, 16), 32: (64, 32), 64: (64, 32)}
# Wide tiles, of 128 or 256 rows, read at least as much of x as of W, all of it through the second-level cache. Its
# bandwidth therefore determines their width and the number of splits of K: of the whole device, and of one SM (64 bytes
# a cycle at 1.7 GHz). Estimates for Llama 8B at 128 rows: query-key-value 48 programs of 128 columns, 19 us (15 from
# memory alone); output projection 64 in 2 parts, 14 us (10); gate and up 224 of 64 and 64, 85 us (70); down 64 in 2
# parts, 44 us (35). At 256 rows: 29, 21, 128 and 67 us. Not measured: `benchmarks/bench_ops.py` compares them with
# cuBLAS.
WIDE_COLUMNS = (128, 64)
L2_BYTES_PER_SECOND = 5.5e12
SM_BYTES_PER_SECOND = 110e9
WIDE_BLOCK_K = 64
WIDE_STAGES = 6


class Rows(NamedTuple):
    """x `[M, K]`."""

    ptr: Any
    stride_m: int
    stride_k: int
    num_rows: int
    width: int


class ProductWeights(NamedTuple):
    """W `[K, N]` and the bias `[N]` or None; without a pointer the product does not exist."""

    ptr: Any
    stride_k: int
    stride_n: int
    bias_ptr: Any
    width: int


class Output(NamedTuple):
    """y `[M, N]`, whose columns are dense."""

    ptr: Any
    stride_m: int


class ProductTiles(NamedTuple):
    """Tile sizes of a product, constant in a kernel."""

    rows: int  # M padded
    block_n: int
    block_k: int
    splits: int  # parts of K
    num_warps: int
    num_stages: int

    def programs(self, *widths_out: int) -> int:
        """Number of programs of one part of K."""
        return sum(-(-width // self.block_n) for width in widths_out)

    def meta(self) -> dict[str, Any]:
        """Keyword arguments of a kernel's launch."""
        return {"TILES": self, "num_warps": self.num_warps, "num_stages": self.num_stages}


NO_WEIGHTS = ProductWeights(None, 0, 0, None, 0)


def takes_rows(input: torch.Tensor) -> bool:
    """Whether these kernels support products of `input [M, K]`."""
    return input.shape[0] <= (MAX_ROWS_FP32 if input.dtype == torch.float32 else MAX_ROWS)


def rows_of(input: torch.Tensor) -> Rows:
    """`input [M, K]` for a kernel."""
    (stride_m, stride_k), (num_rows, width) = input.stride(), input.shape
    return Rows(input, stride_m, stride_k, num_rows, width)


def weights_of(weight: torch.Tensor, bias: torch.Tensor | None) -> ProductWeights:
    """`weight [K, N]`, `bias [N]` for a kernel."""
    stride_k, stride_n = weight.stride()
    return ProductWeights(weight, stride_k, stride_n, bias, weight.shape[1])


def padded_rows(num_rows: int) -> int:
    """Rows of the tile that holds `num_rows`."""
    return max(16, next_power_of_2(num_rows))


@functools.cache
def choose_tiles(
    num_rows: int, width_in: int, widths_out: tuple[int, ...], dtype: torch.dtype, *, num_weights=1, can_split=False
) -> ProductTiles:
    """Tiles of a product `[num_rows, width_in] x [width_in, each of widths_out]`.

    Args:
        widths_out: columns of each weight of one launch.
        num_weights: weights that one program reads side by side (2: gate and up).
        can_split: whether the kernel sums parts of K.
    """
    rows, itemsize = padded_rows(num_rows), dtype.itemsize
    if rows > FEW_ROWS:
        return _wide_tiles(rows, width_in, widths_out, itemsize, num_weights, can_split)

    def programs(block_n: int) -> int:
        return sum(-(-width // block_n) for width in widths_out)

    def parts(block_n: int) -> int:
        """Number of parts of K, a power of two."""
        longest = block_n * width_in * itemsize // SPLIT_BYTES
        most = min(MAX_SPLITS, longest, -(-WANTED_PROGRAMS // programs(block_n))) if can_split else 1
        return 1 << max(0, most.bit_length() - 1)

    needed = MIN_PROGRAMS if can_split or dtype == torch.float32 else MIN_UNSPLIT_PROGRAMS
    choices = COLUMN_TILES[rows]
    block_n = next((choice for choice in choices if programs(choice) * parts(choice) >= needed), choices[-1])
    splits = parts(block_n)
    block_k = STAGE_BYTES // (num_weights * block_n * itemsize)
    # fp32 products run on FMAs, unrolled over the tile: longer tiles only lengthen the code.
    block_k = min(block_k, 64 // num_weights if dtype == torch.float32 else 256, max(16, next_power_of_2(width_in)))
    width = num_weights * block_n  # of W; the stage also holds `rows` of x
    room = 2 * SHARED_BYTES if programs(block_n) * splits <= NUM_SMS else SHARED_BYTES
    while MIN_STAGES * (width + rows) * block_k * itemsize > room and block_k > 32:
        block_k //= 2
    wanted_stages = 1 + -(-IN_FLIGHT_BYTES // (width * block_k * itemsize))
    num_stages = min(wanted_stages, room // ((width + rows) * block_k * itemsize), 7)
    return ProductTiles(rows, block_n, block_k, splits, 4, num_stages)


def _wide_tiles(
    rows: int, width_in: int, widths_out: tuple[int, ...], itemsize: int, num_weights: int, can_split: bool
) -> ProductTiles:
    """The tiles with the shortest time by cache bandwidth; among equals the widest and least split."""

    def programs(block_n: int, splits: int) -> int:
        return splits * sum(-(-width // block_n) for width in widths_out)

    def seconds(block_n: int, splits: int) -> float:
        loaded = (rows + num_weights * block_n) * -(-width_in // splits) * itemsize
        summed = 0 if splits == 1 else 2 * rows * block_n * 4  # written in fp32 and read again
        waves = -(-programs(block_n, splits) // NUM_SMS)
        total = programs(block_n, splits) * (loaded + summed)
        return max(total / L2_BYTES_PER_SECOND, waves * (loaded + summed) / SM_BYTES_PER_SECOND)

    # At least 64 columns of each weight, the M of the tensor cores' widest instruction.
    choices = [(width // num_weights, 1) for width in WIDE_COLUMNS if width // num_weights >= 64]
    if can_split:
        longest = width_in * choices[0][0] * itemsize // SPLIT_BYTES
        parts = range(2, min(MAX_SPLITS, longest) + 1)
        choices += [(block_n, n) for block_n, _ in choices for n in parts if programs(block_n, n) <= NUM_SMS]
    block_n, splits = min(choices, key=lambda choice: seconds(*choice))
    width = num_weights * block_n
    block_k = min(WIDE_BLOCK_K, max(16, next_power_of_2(width_in)))
    # A program alone on an SM may take all of its memory; with 256 rows it is always alone.
    is_alone = rows > 128 or programs(block_n, splits) <= NUM_SMS
    room = 2 * SHARED_BYTES if is_alone else SHARED_BYTES
    num_stages = min(WIDE_STAGES, room // ((width + rows) * block_k * itemsize))
    num_warps = width * rows // 2048  # 64 sums per thread
    return ProductTiles(rows, block_n, block_k, splits, num_warps, num_stages)


def check_linear(
    name: str, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, width_out: int | None = None
) -> None:
    """Raises ValueError if `weight [in, out]` or `bias [out]` do not fit `input [N, in]`; before a kernel reads
    them.
    """
    check_tensor("input", input, shape=(None, None))
    check_tensor(f"{name} weight", weight, like=input, shape=(input.shape[1], width_out))
    if bias is not None:
        check_tensor(f"{name} bias", bias, like=input, shape=(weight.shape[1],), is_dense_last=True)


# The interpreter would multiply the bits of bf16 as integers.
UPCASTS = tl.constexpr(IS_INTERPRETED) if HAS_TRITON else IS_INTERPRETED


@triton.jit
def multiply(weights, rows, total):
    """`total [BLOCK_N, ROWS]` + weights x rows, in fp32; fp32 operands are not truncated to tf32."""
    if UPCASTS:
        weights = weights.to(tl.float32)
        rows = rows.to(tl.float32)
    return tl.dot(weights, rows, total, input_precision="ieee")


@triton.jit
def load_rows(x, k, ROWS: tl.constexpr):
    """All rows of x at `k [BLOCK_K]`: `[BLOCK_K, ROWS]`."""
    m = tl.arange(0, ROWS)
    mask = (k < x.width)[:, None] & (m < x.num_rows)[None, :]
    return tl.load(x.ptr + k[:, None] * x.stride_k + m[None, :] * x.stride_m, mask=mask, other=0.0)


@triton.jit
def load_weights(w, n, k, width_in):
    """Columns `n [BLOCK_N]` of W at `k [BLOCK_K]`: `[BLOCK_N, BLOCK_K]`. An LM head may need 64-bit offsets."""
    mask = (n < w.width)[:, None] & (k < width_in)[None, :]
    offsets = n.to(tl.int64)[:, None] * w.stride_n + k.to(tl.int64)[None, :] * w.stride_k
    return tl.load(w.ptr + offsets, mask=mask, other=0.0)


@triton.jit
def tile_product(x, w, n, k_begin, k_end, TILES: tl.constexpr):
    """Columns `n` of x W over k in [k_begin, k_end): fp32 `[BLOCK_N, ROWS]`."""
    BLOCK_N: tl.constexpr = TILES.block_n
    ROWS: tl.constexpr = TILES.rows
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in range(k_begin, k_end, TILES.block_k):
        k = start + tl.arange(0, TILES.block_k)
        columns = load_weights(w, n, k, x.width)
        rows = load_rows(x, k, ROWS)
        total = multiply(columns, rows, total)
    return total


@triton.jit
def add_bias(total, w, n):
    """`total [BLOCK_N, ROWS]` plus the bias of its columns, if any."""
    if w.bias_ptr is not None:
        total += tl.load(w.bias_ptr + n, mask=n < w.width, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit
def store_columns(y, num_rows, total, n, width_out):
    """Writes `total [BLOCK_N, ROWS]` to columns `n` of y."""
    m = tl.arange(0, total.shape[1])
    mask = (n < width_out)[:, None] & (m < num_rows)[None, :]
    tl.store(y.ptr + m[None, :] * y.stride_m + n[:, None], total.to(y.ptr.dtype.element_ty), mask=mask)


TRITON_DTYPES = {
    getattr(torch, name): getattr(tl, name, None) for name in ("float32", "bfloat16", "float16")
}  # of constexprs


@triton.jit
def activate(x, NAME: tl.constexpr):
    """fp32 in, fp32 out; NAME is a key of ACTIVATIONS. NaN stays NaN."""
    if NAME == "silu" or NAME == "swish":
        y = x * tl.sigmoid(x)
    elif NAME == "relu":
        y = tl.where(x < 0, 0.0, x)
    elif NAME == "relu2":
        y = tl.where(x < 0, 0.0, x * x)
    elif NAME == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "quick_gelu":
        y = x * tl.sigmoid(1.702 * x)
    else:
        tl.static_assert(NAME == "gelu_new" or NAME == "gelu_fast" or NAME == "gelu_pytorch_tanh")
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def gated_activation_kernel(
    gate_ptr,
    up_ptr,
    gate_bias_ptr,
    up_bias_ptr,
    y_ptr,
    gate_stride,
    up_stride,
    width,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program 0 is the row, program 1 a block of it."""
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    if gate_bias_ptr is not None:
        gate += tl.load(gate_bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(up_bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
        gate = gate.to(DTYPE).to(tl.float32)
        up = up.to(DTYPE).to(tl.float32)
    y = activate(gate, ACTIVATION).to(DTYPE).to(tl.float32) * up
    tl.store(y_ptr + row * width + column, y.to(DTYPE), mask=mask)


class SplitProducts(NamedTuple):
    """Buffers for the parts of a split K; None if it is not split."""

    ptr: Any  # [tiles, splits, BLOCK_N, ROWS] fp32
    arrived_ptr: Any  # [tiles] int32, zeros before and after: number of programs that have written their part
    split_width: int  # of K


NO_PARTS = SplitProducts(None, None, 0)


@triton.jit
def _finish(total, x, w, n, residual, y, DTYPE: tl.constexpr):
    """The steps after the product: bias, rounding, residual."""
    total = add_bias(total, w, n).to(DTYPE)
    if residual.ptr is not None:
        m = tl.arange(0, total.shape[1])
        mask = (n < w.width)[:, None] & (m < x.num_rows)[None, :]
        added = tl.load(residual.ptr + m[None, :] * residual.stride_m + n[:, None], mask=mask, other=0.0)
        total = total.to(tl.float32) + added.to(tl.float32)
    store_columns(y, x.num_rows, total, n, w.width)


@triton.jit
def linear_kernel(x, w, residual, y, parts, DTYPE: tl.constexpr, TILES: tl.constexpr):
    """One tile (program 0) over one part of K (program 1)."""
    BLOCK_N: tl.constexpr = TILES.block_n
    ROWS: tl.constexpr = TILES.rows
    SPLITS: tl.constexpr = TILES.splits
    tile = tl.program_id(0)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if SPLITS == 1:
        total = tile_product(x, w, n, 0, x.width, TILES)
        _finish(total, x, w, n, residual, y, DTYPE)
    else:
        part = tl.program_id(1)
        begin = part * parts.split_width
        end = tl.minimum(begin + parts.split_width, x.width)
        total = tile_product(x, w, n, begin, end, TILES)
        place = tl.arange(0, BLOCK_N)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        written = parts.ptr + tile * (SPLITS * BLOCK_N * ROWS) + place
        tl.store(written + part * (BLOCK_N * ROWS), total)
        # All threads' stores come before the barrier. The barrier comes before the count, which releases earlier stores
        # and acquires those that others released; loads bypass the first-level cache, which is not coherent with them.
        tl.debug_barrier()
        num_before = tl.atomic_add(parts.arrived_ptr + tile, 1, sem="acq_rel")
        if num_before == SPLITS - 1:
            tl.store(parts.arrived_ptr + tile, 0)
            total = tl.zeros([BLOCK_N, ROWS], tl.float32)
            for index in range(SPLITS):
                total += tl.load(written + index * (BLOCK_N * ROWS), cache_modifier=".cg")
            _finish(total, x, w, n, residual, y, DTYPE)


@triton.jit
def _project(x, w, tile, y, column, TILES: tl.constexpr):
    """One tile of one projection, whose columns of y start at `column`."""
    n = tile * TILES.block_n + tl.arange(0, TILES.block_n)
    total = add_bias(tile_product(x, w, n, 0, x.width, TILES), w, n)
    m = tl.arange(0, TILES.rows)
    mask = (n < w.width)[:, None] & (m < x.num_rows)[None, :]
    place = y.ptr + m[None, :] * y.stride_m + (column + n)[:, None]
    tl.store(place, total.to(y.ptr.dtype.element_ty), mask=mask)


@triton.jit
def qkv_kernel(x, q, k, v, y, TILES: tl.constexpr):
    """Programs: tiles of q, of k, of v. y is `[M, H D + 2 K D]`.

    Each branch contains the whole product: with weights and strides chosen at run time the compiler would not know that
    a stride is 1, and could not use wide loads. One fused weight is passed as q.
    """
    tile = tl.program_id(0)
    q_tiles = tl.cdiv(q.width, TILES.block_n)
    if tile < q_tiles:
        _project(x, q, tile, y, 0, TILES)
    if k.ptr is not None:
        kv_tiles = tl.cdiv(k.width, TILES.block_n)
        if (tile >= q_tiles) & (tile < q_tiles + kv_tiles):
            _project(x, k, tile - q_tiles, y, q.width, TILES)
        if (tile >= q_tiles + kv_tiles) & (tile < q_tiles + 2 * kv_tiles):
            column = q.width + k.width
            _project(x, v, tile - q_tiles - kv_tiles, y, column, TILES)


@triton.jit
def up_kernel(x, gate, up, y, ACTIVATION: tl.constexpr, TILES: tl.constexpr):
    """One tile of `inner`: both weights are streamed for the same rows. gate.ptr None: no gate."""
    DTYPE: tl.constexpr = y.ptr.dtype.element_ty
    BLOCK_N: tl.constexpr = TILES.block_n
    ROWS: tl.constexpr = TILES.rows
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.zeros([BLOCK_N, ROWS], tl.float32)
    outer = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in range(0, x.width, TILES.block_k):
        k = start + tl.arange(0, TILES.block_k)
        up_tile = load_weights(up, n, k, x.width)
        rows = load_rows(x, k, ROWS)
        inner = multiply(up_tile, rows, inner)
        if gate.ptr is not None:
            gate_tile = load_weights(gate, n, k, x.width)
            outer = multiply(gate_tile, rows, outer)
    inner = add_bias(inner, up, n).to(DTYPE).to(tl.float32)
    if gate.ptr is not None:
        outer = add_bias(outer, gate, n).to(DTYPE).to(tl.float32)
        inner = activate(outer, ACTIVATION).to(DTYPE).to(tl.float32) * inner
    else:
        inner = activate(inner, ACTIVATION)
    store_columns(y, x.num_rows, inner, n, up.width)
