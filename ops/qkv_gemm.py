"""Norm, then the query, key and value projections.

    normed = norm(input);  q, k, v = normed Wq + bq, normed Wk + bk, normed Wv + bv

The three weights are three tensors or one fused tensor, all [in, out]; a fused one holds its columns as
blocks [q | k | v] (GPT-2, Phi-3) or grouped by key/value head, [G queries, key, value] for each (GPT-NeoX,
BLOOM, Falcon, Megatron). Moves the weights once: E (H + 2K) D elements, and does 2 N E (H + 2K) D
operations for N rows.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from hybrid_engine.ops.norm import NORM_OPS
from hybrid_engine.ops.vector_matmul import linear_transposed

QKVLayout = Literal["blocks", "grouped"]


class QKVGemmOp:
    """Callable `(input, weights, biases, gamma, beta) -> ((q, k, v), normed)`.

    Args:
        norm: kind of the norm in front (see `ops.norm`); None: no norm.
        eps: of the norm.
        num_heads, num_kv_heads, head_dim: H, K, D; G = H / K.
        layout: of the columns of a fused weight.
    """

    def __init__(
        self,
        norm: str | None,
        eps: float,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        layout: QKVLayout = "blocks",
    ):
        self.norm = None if norm is None else NORM_OPS[norm](eps)
        self.heads = (num_kv_heads, num_heads // num_kv_heads, head_dim)  # K, G, D
        self.layout = layout

    def __call__(
        self,
        input: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """`input [N, E]`; one fused or three weights `[E, out]` with as many biases.

        Returns q `[N, K, G, D]`, k and v `[N, K, D]`, and the normed input `[N, E]`.
        """
        return self.reference(input, weights, biases, gamma, beta)

    def reference(
        self,
        input: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """The same in plain torch."""
        normed = input if self.norm is None else self.norm(input, gamma, beta)
        projected = [linear_transposed(normed, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return self.split(projected), normed

    def split(self, projected: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The projections' outputs, one fused or three, as views by head."""
        num_kv_heads, group, head_dim = self.heads
        if len(projected) == 1 and self.layout == "grouped":
            by_head = projected[0].unflatten(-1, (num_kv_heads, group + 2, head_dim))
            return by_head[:, :, :group], by_head[:, :, group], by_head[:, :, group + 1]
        kv_size = num_kv_heads * head_dim
        if len(projected) == 1:
            projected = projected[0].split((group * kv_size, kv_size, kv_size), dim=-1)
        q, k, v = projected
        return q.unflatten(-1, self.heads), *(x.unflatten(-1, (num_kv_heads, head_dim)) for x in (k, v))
