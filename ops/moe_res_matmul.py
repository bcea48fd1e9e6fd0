"""Residual mixture of experts: a dense MLP and the experts, mixed by two coefficients per token.

    y[n] = residual[n] * coef[n, 0] + output[n] * coef[n, 1]

The coefficients are the result of a small linear and a softmax for the token (Rajbhandari et al. 2022, "DeepSpeed-MoE",
section 4.1.1). Argument order is DeepSpeed's binding's; note that DeepSpeed's training layer (deepspeed/moe/layer.py)
gives column 0 to the experts' output, so a caller passes the tensor weighted by column 0 as `residual`. Moves 3 N E
elements, does 3 N E operations; both products are rounded to the dtype, then the sum.
"""

import torch

from hybrid_engine.ops.dispatch import (
    Launch,
    check_tensor,
    kernel_or_reference,
    next_power_of_2,
    prepared,
    tl,
    triton,
    use_triton,
)

# Elements of a row that one program mixes.
MAX_BLOCK = 1024


class MoEResMatmulOp:
    """Callable `(residual [N, E], coef [N, 2], output [N, E]) -> [N, E]`."""

    def __call__(self, residual: torch.Tensor, coef: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Raises ValueError if shapes, dtypes or devices differ."""
        check_tensor("residual", residual, shape=(None, None))
        check_tensor("coef", coef, like=residual, shape=(len(residual), 2))
        check_tensor("output", output, like=residual, shape=residual.shape)
        if use_triton(residual):
            return kernel_or_reference(self._launch, self.reference, residual, coef, output)
        return self.reference(residual, coef, output)

    def reference(self, residual: torch.Tensor, coef: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """The reference: the function of the kernel in plain torch."""
        return residual * coef[:, :1] + output * coef[:, 1:]

    def _launch(self, residual: torch.Tensor, coef: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        mixed = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
        if mixed.numel():
            strides = (*residual.stride(), *coef.stride(), *output.stride())
            prepared(_prepare, residual, coef, output)(residual, coef, output, mixed, residual.shape[1], *strides)
        return mixed


def _prepare(residual: torch.Tensor, coef: torch.Tensor, output: torch.Tensor) -> Launch:
    rows, width = residual.shape
    block = min(MAX_BLOCK, max(next_power_of_2(width), 16))
    return Launch(_mix_kernel, (rows, -(-width // block)), residual.device, BLOCK=block)


@triton.jit
def _mix_kernel(
    residual, coef, output, mixed, width,
    stride_rn, stride_re, stride_cn, stride_c, stride_on, stride_oe,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = e < width
    dtype = mixed.dtype.element_ty
    first = tl.load(coef + row * stride_cn).to(tl.float32)
    second = tl.load(coef + row * stride_cn + stride_c).to(tl.float32)
    a = tl.load(residual + row * stride_rn + e * stride_re, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(output + row * stride_on + e * stride_oe, mask=mask, other=0.0).to(tl.float32)
    total = (a * first).to(dtype).to(tl.float32) + (b * second).to(dtype).to(tl.float32)
    tl.store(mixed + row * width + e, total.to(dtype), mask=mask)
