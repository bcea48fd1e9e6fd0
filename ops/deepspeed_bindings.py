"""Ops that are named after DeepSpeed's bindings and that containers do not use.

`GELUGemmOp`, projection, GELU, projection (`fused_gemm_gelu`): `y = gelu(x W + b) Wout`. Both GELUs: "gelu" is the
exact one (erf), "gelu_new" the tanh approximation (`linears.py`). Moves both weights once, 2 E I elements, and does
4 N E I operations.

`LinearOp`: `y = x W + b (+ residual)`, the product of `linears.py`.

`ResidualAddOp` (`residual_add`): the sum of a block's output, its residual and its biases, if a group of `tp_size`
processes sums the result.

    after attention:   out = hidden + (residual + attention + b_attention + b_final) / tp_size
    parallel blocks:   out = hidden + attention + (residual + b_attention + b_final) / tp_size

`hidden`, the MLP's output, is each process's own part of a sum that an all-reduce completes, so it counts whole.
Tensors that every process has in full are divided, so that the all-reduce counts them once. If the MLP comes after the
attention, the attention's output has been all-reduced already; if both run in parallel (GPT-J), it is a part like
`hidden`, and one all-reduce handles both. Sums are fp32, rounded once. Moves 3 or 4 N E elements, does about 5 N E
operations. DeepSpeed's works in place, this one does not.
"""

import torch

from hybrid_engine.ops.cpu_kernels import linear_transposed
from hybrid_engine.ops.dispatch import Launch, check_tensor, kernel_or_reference, prepared, tl, triton, use_triton
from hybrid_engine.ops.linears import ACTIVATIONS, VectorMatMulOp, up_in_torch, up_product
from hybrid_engine.ops.linears_kernels import takes_rows

GELUS = ("gelu", "gelu_new")
BLOCK = 1024


class GELUGemmOp:
    """Callable `(input [N, E], weight [E, I], bias [I] or None, weight_out [I, E]) -> [N, E]`.

    Args:
        activation: "gelu" or "gelu_new".
    """

    def __init__(self, activation: str = "gelu_new"):
        if activation not in GELUS:
            raise ValueError(f"activation={activation!r} must be one of {', '.join(GELUS)}")
        self.activation_name, self.activation = activation, ACTIVATIONS[activation]
        self.output = VectorMatMulOp()

    def __call__(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, weight_out: torch.Tensor
    ) -> torch.Tensor:
        if not use_triton(input) or not takes_rows(input):
            return self.reference(input, weight, bias, weight_out)
        up = (weight, bias)
        inner = kernel_or_reference(up_product, up_in_torch, input, None, up, self.activation_name)
        return self.output(inner, weight_out)

    def reference(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, weight_out: torch.Tensor
    ) -> torch.Tensor:
        """The reference: the function of the kernel in plain torch."""
        return self.output.reference(self.activation(linear_transposed(input, weight, bias)), weight_out)


class LinearOp(VectorMatMulOp):
    """Callable `(input [N, in], weight [in, out], bias [out] or None, residual [N, out] or None) -> [N, out]`."""


@triton.jit
def residual_add_kernel(
    hidden_ptr,
    residual_ptr,
    attention_ptr,
    attention_bias_ptr,
    final_bias_ptr,
    y_ptr,
    hidden_stride,
    residual_stride,
    attention_stride,
    width,
    tp_size,
    IS_PARALLEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program 0 is the row, program 1 a block of it. attention_ptr and the biases may be None."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    own = tl.load(hidden_ptr + row * hidden_stride + column, mask=mask, other=0.0).to(tl.float32)
    shared = tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
    if attention_ptr is not None:
        attention = tl.load(attention_ptr + row * attention_stride + column, mask=mask, other=0.0).to(tl.float32)
        if IS_PARALLEL:
            own += attention
        else:
            shared += attention
    if attention_bias_ptr is not None:
        shared += tl.load(attention_bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if final_bias_ptr is not None:
        shared += tl.load(final_bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    y = own + shared / tp_size
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=mask)


class ResidualAddOp:
    """Callable `(hidden_state, residual, add_bias, attention_output, residual_add, attention_bias, final_bias)`.

    Args:
        tp_size: processes whose results an all-reduce sums.
        mlp_after_attention: False if attention and MLP run in parallel on the same input.
    """

    def __init__(self, tp_size: int = 1, mlp_after_attention: bool = True):
        self.tp_size, self.mlp_after_attention = tp_size, mlp_after_attention

    def __call__(
        self,
        hidden_state: torch.Tensor,
        residual: torch.Tensor,
        add_bias: bool = True,
        attention_output: torch.Tensor | None = None,
        residual_add: torch.Tensor | None = None,
        attention_bias: torch.Tensor | None = None,
        final_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All `[N, E]`, biases `[E]` -> `[N, E]`.

        Args:
            add_bias: whether `attention_bias` is still to be added; False if the attention output includes it.
            residual_add: replaces `attention_output` if given (blocks that norm after the sum).
        """
        attention = attention_output if residual_add is None else residual_add
        bias = attention_bias if add_bias else None
        if not use_triton(hidden_state):
            return self._sum(hidden_state, residual, attention, bias, final_bias)
        return kernel_or_reference(self._launch, self._sum, hidden_state, residual, attention, bias, final_bias)

    def reference(
        self,
        hidden_state: torch.Tensor,
        residual: torch.Tensor,
        add_bias: bool = True,
        attention_output: torch.Tensor | None = None,
        residual_add: torch.Tensor | None = None,
        attention_bias: torch.Tensor | None = None,
        final_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The reference: the function of the kernel in plain torch."""
        attention = attention_output if residual_add is None else residual_add
        return self._sum(hidden_state, residual, attention, attention_bias if add_bias else None, final_bias)

    def _sum(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        attention: torch.Tensor | None,
        attention_bias: torch.Tensor | None,
        final_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        shared = [residual, attention_bias, final_bias]
        own = [hidden]
        (shared if self.mlp_after_attention else own).append(attention)
        own_sum, shared_sum = (sum(x.to(wide) for x in parts if x is not None) for parts in (own, shared))
        return (own_sum + shared_sum / self.tp_size).to(hidden.dtype)

    def _launch(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        attention: torch.Tensor | None,
        attention_bias: torch.Tensor | None,
        final_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        terms = (hidden, residual, attention, attention_bias, final_bias)
        launch = prepared(_prepare_sum, self.tp_size, not self.mlp_after_attention, *terms)
        output = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        attention_row = 0 if attention is None else attention.stride(0)
        launch(*terms, output, hidden.stride(0), residual.stride(0), attention_row, hidden.shape[1], self.tp_size)
        return output


def _prepare_sum(
    tp_size: int,  # Triton may compile for its value
    is_parallel: bool,
    hidden: torch.Tensor,
    residual: torch.Tensor,
    attention: torch.Tensor | None,
    attention_bias: torch.Tensor | None,
    final_bias: torch.Tensor | None,
) -> Launch:
    check_tensor("hidden_state", hidden, shape=(None, None), is_dense_last=True)
    check_tensor("residual", residual, like=hidden, shape=hidden.shape, is_dense_last=True)
    if attention is not None:
        check_tensor("attention_output", attention, like=hidden, shape=hidden.shape, is_dense_last=True)
    for name, bias in (("attention_bias", attention_bias), ("final_bias", final_bias)):
        if bias is not None:
            check_tensor(name, bias, like=hidden, shape=hidden.shape[1:], is_dense_last=True)
    grid = (hidden.shape[0], -(-hidden.shape[1] // BLOCK))
    return Launch(residual_add_kernel, grid, hidden.device, IS_PARALLEL=is_parallel, BLOCK=BLOCK, num_warps=4)
