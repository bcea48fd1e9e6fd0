"""xIELU, an activation with two learned numbers (Huang and Schlag 2024, arXiv 2411.13010).

    y = p x^2 + beta x                            for x > 0
    y = n (expm1(min(x, eps)) - x) + beta x       otherwise
    p = softplus(alpha_p),  n = beta + softplus(alpha_n)

A row is read and written once: 2 N I elements, about 10 N I operations, in fp32 and rounded once. N rows, I width.

Source of this form, with `eps`: transformers, activations.py (XIELUActivation).
"""

import torch
import torch.nn.functional as F

from hybrid_engine.ops.dispatch import Launch, check_tensor, kernel_or_reference, prepared, tl, triton, use_triton

# Elements of a row that one program computes.
BLOCK = 1024


class XIELUOp:
    """Callable `(x [N, I], alpha_p [1], alpha_n [1]) -> [N, I]`.

    Args:
        beta: slope at 0.
        eps: greatest argument of `expm1`, below 0.
    """

    def __init__(self, beta: float = 0.5, eps: float = -1e-6):
        self.beta, self.eps = float(beta), float(eps)

    def __call__(self, x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor) -> torch.Tensor:
        """Raises ValueError for tensors of another shape, dtype or device."""
        check_tensor("x", x, shape=(None, None))
        for name, alpha in (("alpha_p", alpha_p), ("alpha_n", alpha_n)):
            check_tensor(name, alpha, like=x, shape=(1,))
        if use_triton(x):
            return kernel_or_reference(self._launch, self.reference, x, alpha_p, alpha_n)
        return self.reference(x, alpha_p, alpha_n)

    def reference(self, x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor) -> torch.Tensor:
        """The reference: the function of the kernel in plain torch."""
        wide = torch.promote_types(x.dtype, torch.float32)
        value, p, n = x.to(wide), F.softplus(alpha_p.to(wide)), self.beta + F.softplus(alpha_n.to(wide))
        below = n * (torch.expm1(value.clamp(max=self.eps)) - value)
        return (torch.where(value > 0, p * value.square(), below) + self.beta * value).to(x.dtype)

    def _launch(self, x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            launch = prepared(_prepare, x, alpha_p, alpha_n)
            launch(x, alpha_p, alpha_n, y, x.stride(0), x.shape[1], self.beta, self.eps)
        return y


def _prepare(x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor) -> Launch:
    return Launch(xielu_kernel, (len(x), -(-x.shape[1] // BLOCK)), x.device, BLOCK=BLOCK, num_warps=4)


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def xielu_kernel(x_ptr, alpha_p_ptr, alpha_n_ptr, y_ptr, stride, width, beta, eps, BLOCK: tl.constexpr):
    """Program 0 is the row, program 1 a block of it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(x_ptr + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    p = _softplus(tl.load(alpha_p_ptr).to(tl.float32))
    n = beta + _softplus(tl.load(alpha_n_ptr).to(tl.float32))
    low = tl.minimum(x, eps)
    # Near 0 exp(x) - 1 loses the digits that the series keeps.
    series = 0.041666668 + low * (0.008333334 + low * (0.0013888889 + low * 0.0001984127))
    series = low * (1.0 + low * (0.5 + low * (0.16666667 + low * series)))
    below = n * (tl.where(low > -0.3, series, tl.exp(low) - 1.0) - x)
    y = tl.where(x > 0.0, p * x * x, below) + beta * x
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=mask)
