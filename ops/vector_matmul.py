"""Matrix product with a transposed linear: `y = x W (+ b) (+ residual)`, W stored or viewed as [in, out].

Moves in x out elements of W once for all N rows and does 2 N in out operations: below about 100 rows on a
GPU it runs at the speed of the memory. A `torch.nn.Linear` weight is [out, in]; its `.t()` is the view
this op takes, so nothing is copied.

The kernel is for at most 64 rows (`skinny_gemm`); more go to cuBLAS. Where the tiles do not fill the GPU, K
is split: the parts are written in fp32 and a second kernel sums them in order.

On a CPU fp32 products run as `cpu_gemm.py` says; the result may lie by columns there.
"""

import torch

from hybrid_engine.ops import dispatch
from hybrid_engine.ops.cpu_gemm import linear_transposed
from hybrid_engine.ops.dispatch import check_tensor, tl, triton, use_triton
from hybrid_engine.ops.skinny_gemm import MAX_ROWS, add_bias, check_linear, choose_tiles, store_columns, tile_product

# Outputs of a program that sums parts of K.
MERGE_BLOCK = 1024


def linear_fp32(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`[N, out]` fp32. On a CPU a 16-bit product is rounded before: torch has no other that copies no weight."""
    if not input.is_cuda or input.dtype == torch.float32:
        return linear_transposed(input, weight, bias).float().contiguous()  # samplers go along the rows
    output = torch.mm(input, weight, out_dtype=torch.float32)
    return output if bias is None else output + bias


@triton.jit
def linear_kernel(
    x_ptr,
    stride_xm,
    stride_xk,
    w_ptr,
    stride_wk,
    stride_wn,
    bias_ptr,
    residual_ptr,
    stride_rm,
    y_ptr,
    num_rows,
    width_in,
    width_out,
    split_width,
    DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of columns (program 0) over one part of K (program 1). With SPLITS > 1 y is `[SPLITS, M, N]` fp32."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    k_end = width_in
    if SPLITS > 1:
        k_end = tl.minimum((part + 1) * split_width, width_in)
    total = tile_product(
        x_ptr,
        stride_xm,
        stride_xk,
        num_rows,
        w_ptr,
        stride_wk,
        stride_wn,
        n,
        part * split_width,
        k_end,
        width_in,
        width_out,
        None,
        None,
        None,
        None,
        "none",
        ROWS,
        BLOCK_N,
        BLOCK_K,
    )
    if SPLITS > 1:
        store_columns(y_ptr + part * num_rows * width_out, width_out, num_rows, total, n, width_out, ROWS)
    else:
        total = add_bias(total, bias_ptr, n, width_out).to(DTYPE)
        if residual_ptr is not None:
            m = tl.arange(0, ROWS)
            mask = (n < width_out)[:, None] & (m < num_rows)[None, :]
            residual = tl.load(residual_ptr + m[None, :] * stride_rm + n[:, None], mask=mask, other=0.0)
            total = total.to(tl.float32) + residual.to(tl.float32)
        store_columns(y_ptr, width_out, num_rows, total, n, width_out, ROWS)


@triton.jit
def merge_kernel(
    parts_ptr,
    bias_ptr,
    residual_ptr,
    stride_rm,
    y_ptr,
    num_rows,
    width_out,
    DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums the parts of K in order and does what `linear_kernel` does after its product."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_rows * width_out
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + part * num_rows * width_out + index, mask=mask, other=0.0)
    n = index % width_out
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    total = total.to(DTYPE)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + (index // width_out) * stride_rm + n, mask=mask, other=0.0)
        total = total.to(tl.float32) + residual.to(tl.float32)
    tl.store(y_ptr + index, total.to(y_ptr.dtype.element_ty), mask=mask)


TRITON_DTYPES = {
    getattr(torch, name): getattr(tl, name, None) for name in ("float32", "bfloat16", "float16")
}  # of constexprs


class VectorMatMulOp:
    """Callable `(input, weight, bias=None, residual=None) -> [N, out]`.

    Args:
        fp32_output: the LM head's form: the product is returned in fp32 whatever the dtype of the weights.
    """

    def __init__(self, fp32_output: bool = False):
        self.fp32_output = fp32_output

    def __call__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`input [N, in]`, `weight [in, out]`, `bias [out]`, `residual [N, out]` in the output's dtype."""
        if not use_triton(input) or input.shape[0] > MAX_ROWS:
            return self.reference(input, weight, bias, residual)
        return self._launch(input, weight, bias, residual)

    def reference(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The same function in torch: the product is rounded to its dtype before the residual is added."""
        if not self.fp32_output:
            return linear_transposed(input, weight, bias, residual)
        output = linear_fp32(input, weight, bias)
        return output if residual is None else output + residual

    def _launch(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        check_linear("linear", input, weight, bias)
        (num_rows, width_in), width_out = input.shape, weight.shape[1]
        dtype = torch.float32 if self.fp32_output else input.dtype
        if residual is not None:
            shape = (num_rows, width_out)
            check_tensor("residual", residual, like=input, dtype=dtype, shape=shape, is_dense_last=True)
        output = torch.empty(num_rows, width_out, dtype=dtype, device=input.device)
        tiles = choose_tiles(num_rows, width_in, (width_out,), input.dtype, can_split=True)
        epilogue = (bias, residual, 0 if residual is None else residual.stride(0))
        split_width = -(-width_in // (tiles.splits * tiles.block_k)) * tiles.block_k
        common = {"device": input.device, "DTYPE": TRITON_DTYPES[dtype], "SPLITS": tiles.splits}
        parts = output
        if tiles.splits > 1:
            parts = torch.empty(tiles.splits, num_rows, width_out, dtype=torch.float32, device=input.device)
        grid = (-(-width_out // tiles.block_n), tiles.splits)
        operands = (input, *input.stride(), weight, *weight.stride(), *epilogue, parts)
        dispatch.launch(
            linear_kernel, grid, *operands, num_rows, width_in, width_out, split_width, **common, **tiles.meta()
        )
        if tiles.splits > 1:
            blocks = (-(-output.numel() // MERGE_BLOCK),)
            dispatch.launch(
                merge_kernel, blocks, parts, *epilogue, output, num_rows, width_out, **common, BLOCK=MERGE_BLOCK
            )
        return output
