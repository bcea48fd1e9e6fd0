"""Matrix product with a transposed linear: `y = x W (+ b) (+ residual)`, W stored or viewed as [in, out].

Moves in x out elements of W once for all N rows and does 2 N in out operations: below about 100 rows on a GPU it is
limited by memory bandwidth. A `torch.nn.Linear` weight is [out, in]; its `.t()` is the view this op takes, so nothing
is copied.

The kernel is for few rows (`skinny_gemm`). With more rows cuBLAS is used, and above 64 rows also for products without a
bias or residual, which take one launch there too. If the tiles do not fill the GPU, K is split: the parts are written
in fp32, and the last program of a tile sums them, always in the same order.

On a CPU `cpu_gemm.py` computes fp32 products, whose result may be stored by columns.
"""

from typing import Any, NamedTuple

import torch

from hybrid_engine.ops.cpu_gemm import linear_by_rows, linear_transposed
from hybrid_engine.ops.dispatch import Launch, check_tensor, kernel_or_reference, prepared, tl, triton, use_triton
from hybrid_engine.ops.skinny_gemm import (
    FEW_ROWS,
    NUM_SMS,
    Output,
    add_bias,
    check_linear,
    choose_tiles,
    rows_of,
    store_columns,
    takes_rows,
    tile_product,
    weights_of,
)


def linear_fp32(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`[N, out]` fp32. On a CPU a 16-bit product is rounded first: other products of torch copy the weight."""
    if not input.is_cuda or input.dtype == torch.float32:
        return linear_by_rows(input, weight, bias)
    output = torch.mm(input, weight, out_dtype=torch.float32)
    return output if bias is None else output + bias


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


TRITON_DTYPES = {
    getattr(torch, name): getattr(tl, name, None) for name in ("float32", "bfloat16", "float16")
}  # of constexprs


class VectorMatMulOp:
    """Callable `(input, weight, bias=None, residual=None) -> [N, out]`.

    Args:
        fp32_output: for the LM head: returns the product in fp32 for any dtype of the weights.
    """

    def __init__(self, fp32_output: bool = False):
        self.fp32_output = fp32_output
        # On the device of the first call; a graph may hold its address. Products of one op must not run concurrently.
        self._arrived: torch.Tensor | None = None

    def __call__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`input [N, in]`, `weight [in, out]`, `bias [out]`, `residual [N, out]` in the output's dtype."""
        is_bare = input.shape[0] > FEW_ROWS and (self.fp32_output or (bias is None and residual is None))
        if not use_triton(input) or not takes_rows(input) or is_bare:
            return self.reference(input, weight, bias, residual)
        return kernel_or_reference(self._launch, self.reference, input, weight, bias, residual)

    def reference(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The op in torch: the product is rounded to its dtype before the residual is added."""
        if not self.fp32_output:
            return linear_transposed(input, weight, bias, residual)
        output = linear_fp32(input, weight, bias)
        return output if residual is None else output + residual

    def _launch(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        product = prepared(_prepare, self.fp32_output, input, weight, bias, residual)
        output = torch.empty(product.sizes, dtype=product.dtype, device=input.device)
        parts = NO_PARTS
        if product.parts is not None:
            parts = SplitProducts(
                torch.empty(product.parts, dtype=torch.float32, device=input.device),
                self._counts(input.device),
                product.split_width,
            )
        product.launch(
            rows_of(input), weights_of(weight, bias), Output(residual, product.residual_row),
            Output(output, product.sizes[1]), parts,
        )  # fmt: skip
        return output

    def _counts(self, device: torch.device) -> torch.Tensor:
        if self._arrived is None or self._arrived.device != device:
            self._arrived = torch.zeros(NUM_SMS, dtype=torch.int32, device=device)
        return self._arrived


class Product(NamedTuple):
    """A launch of the kernel, and the sizes of its outputs."""

    launch: Launch
    sizes: tuple[int, int]  # of the output
    dtype: torch.dtype
    residual_row: int  # stride
    parts: tuple[int, ...] | None  # sizes of the parts of a split K; None: it is not split
    split_width: int


def _prepare(
    fp32_output: bool,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> Product:
    check_linear("linear", input, weight, bias)
    (num_rows, width_in), width_out = input.shape, weight.shape[1]
    dtype = torch.float32 if fp32_output else input.dtype
    if residual is not None:
        shape = (num_rows, width_out)
        check_tensor("residual", residual, like=input, dtype=dtype, shape=shape, is_dense_last=True)
    tiles = choose_tiles(num_rows, width_in, (width_out,), input.dtype, can_split=True)
    num_tiles = tiles.programs(width_out)
    launch = Launch(linear_kernel, (num_tiles, tiles.splits), input.device, DTYPE=TRITON_DTYPES[dtype], **tiles.meta())
    residual_row = 0 if residual is None else residual.stride(0)
    if tiles.splits == 1:
        return Product(launch, (num_rows, width_out), dtype, residual_row, None, 0)
    assert num_tiles <= NUM_SMS, f"{num_tiles=}"  # products with more tiles are not split
    sizes = (num_tiles, tiles.splits, tiles.block_n, tiles.rows)
    split_width = -(-width_in // (tiles.splits * tiles.block_k)) * tiles.block_k
    return Product(launch, (num_rows, width_out), dtype, residual_row, sizes, split_width)
