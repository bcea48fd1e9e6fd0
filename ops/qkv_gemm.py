"""Norm, then the query, key and value projections.

    normed = norm(input);  q, k, v = normed Wq + bq, normed Wk + bk, normed Wv + bv

The three weights are three tensors or one fused tensor (GPT-2), all [in, out]. Moves the weights once:
E (H + 2K) D elements, and does 2 N E (H + 2K) D operations for N rows.
"""

from collections.abc import Sequence

import torch

from hybrid_engine.ops.norm import NORM_OPS
from hybrid_engine.ops.vector_matmul import linear_transposed


class QKVGemmOp:
    """Callable `(input, weights, biases, gamma, beta) -> ((q, k, v), normed)`.

    Args:
        norm: "layer" or "rms".
        eps: of the norm.
        sizes: widths (H*D, K*D, K*D) of q, k and v, by which a fused projection is split.
    """

    def __init__(self, norm: str, eps: float, sizes: tuple[int, int, int]):
        self.norm = NORM_OPS[norm](eps)
        self.sizes = sizes

    def __call__(
        self,
        input: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """`input [N, E]`; one fused or three weights `[E, out]` with as many biases -> q, k, v `[N, size]`."""
        normed = self.norm(input, gamma, beta)
        projected = [linear_transposed(normed, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        if len(projected) == 1:
            return projected[0].split(self.sizes, dim=-1), normed
        return tuple(projected), normed
