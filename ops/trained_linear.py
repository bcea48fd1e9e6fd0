"""A linear layer in fp32 on a CPU for training: `y = x W^T (+ b)`, on oneDNN where that is faster than MKL.

    dx = dy W      dW = dy^T x      db = sum of dy over the rows

On processors that are not Intel's (`cpu_kernels.py` says why) oneDNN takes 0.75 to 0.88 of MKL's time for `y`, 0.66 to
0.88 for `dx` and 0.95 to 1.16 for `dW`, which stays with MKL: 2048 and 4096 rows, 384 x 384 to 1024 x 384, one core of
an AMD EPYC, both in turns (torch 2.13). On Zen 5 it takes half for `y` and `dx`, 0.51 to 0.65 for `dW`. oneDNN gets the
weight as it is stored and packs it at every call, which these figures include, so no packed copy can be older than the
weight. Small products do not gain back the cost of an autograd function in Python. bf16 does not need this: torch
always multiplies it by oneDNN.

N rows of any number of dimensions.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from hybrid_engine.ops.cpu_kernels import is_watched, prefers_onednn, product, product_over_rows

# Forward and backward of a layer together, measured alternately as above: 0.97 to 1.02 of MKL's time at 2**26, 0.93 to
# 0.96 at 2**27, 0.89 to 0.93 from 2**28 on. Zen 5 gains from 2**23 on, 0.82, if many products have the same number of
# rows; but for each new number of rows oneDNN first compiles, 0.3 to 1 ms for each of three products, and caches the
# result.
LEAST_MULTIPLICATIONS = 2**27


def is_faster_on_onednn(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear` should replace `torch.nn.functional.linear` for `input [..., in]` and `weight [out, in]`.

    Never while operations are observed or changed (torch.compile, autocast, dispatch modes such as exact mode's), in
    forward-mode differentiation, or for tensors and weights of other types.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if input.dim() < 2 or input.numel() * len(weight) < LEAST_MULTIPLICATIONS:
        return False
    if type(input) is not torch.Tensor or type(weight) is not nn.Parameter or weight.dtype != input.dtype:
        return False
    if input.shape[-1] != weight.shape[1] or weight.device != input.device or not prefers_onednn(input):
        return False
    return not torch.is_autocast_enabled("cpu") and not is_watched() and not derives_forward()


def derives_forward() -> bool:
    """Whether forward-mode differentiation is active: in `torch.func.jvp`, `hessian`, a `dual_level`."""
    return getattr(forward_ad, "_current_level", -1) >= 0


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`input [..., in]`, `weight [out, in]`, `bias [out]` -> `[..., out]`, twice differentiable in reverse mode."""
    return _Linear.apply(input, weight, bias)


class _Linear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return product(input.flatten(0, -2), weight.t(), bias).unflatten(0, input.shape[:-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        input, weight, _ = inputs
        of_input, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(input if of_weight else None, weight if of_input else None)

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        # reshape, for which torch has rules for batches of gradients (`is_grads_batched`).
        rows = above[0].reshape(-1, above[0].shape[-1])  # [N, out]
        by_weight = by_input = by_bias = None
        # A second derivative requires differentiable operations.
        is_derived = torch.is_grad_enabled() or derives_forward()
        if of_input:
            by_input = rows @ weight if is_derived else product(rows, weight)
            by_input = by_input.reshape(*above[0].shape[:-1], weight.shape[1])
        if of_weight:
            inputs = input.reshape(-1, input.shape[-1])
            by_weight = rows.t() @ inputs if is_derived else product_over_rows(rows, inputs)
        if of_bias:
            by_bias = rows.sum(0)
        return by_input, by_weight, by_bias
