"""The MLP block: residual add, norm, up (or gate and up), activation, down.

    residual_add = input + residual
    normed       = norm(residual_add)
    inner        = act(normed Wup + bup)                         plain
                   act(normed Wgate + bgate) * (normed Wup + bup)   gated
    output       = inner Wdown + bdown

Moves the two or three weights once, E I elements each, and does 2 N E I operations for each.
`input` is the attention's output with its bias already added.
"""

import torch

from hybrid_engine.ops.activation import ACTIVATIONS
from hybrid_engine.ops.norm import NORM_OPS
from hybrid_engine.ops.vector_matmul import linear_transposed


class MLPGemmOp:
    """Callable `(input, residual, gate, up, down, gamma, beta) -> (output, residual_add)`.

    Each of `gate`, `up`, `down` is a pair (weight [in, out], bias [out] or None); `gate` may be None.
    """

    def __init__(self, norm: str, eps: float, activation: str):
        self.norm = NORM_OPS[norm](eps)
        self.activation = ACTIVATIONS[activation]

    def __call__(
        self,
        input: torch.Tensor,
        residual: torch.Tensor,
        gate: tuple[torch.Tensor, torch.Tensor | None] | None,
        up: tuple[torch.Tensor, torch.Tensor | None],
        down: tuple[torch.Tensor, torch.Tensor | None],
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`input`, `residual` `[N, E]` -> output `[N, E]` without the residual, and the residual stream `[N, E]`."""
        residual_add = input + residual
        normed = self.norm(residual_add, gamma, beta)
        inner = linear_transposed(normed, *up)
        inner = self.activation(inner) if gate is None else self.activation(linear_transposed(normed, *gate)) * inner
        return linear_transposed(inner, *down), residual_add
