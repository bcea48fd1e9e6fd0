"""DeepSpeed's residual mixture: a dense MLP in addition to the experts, mixed with them by two coefficients per token.

Source: deepspeed/moe/layer.py (`use_residual`); column 0 of the coefficients weights the experts. N packed tokens, E
hidden size.
"""

import torch
from torch import nn

from hybrid_engine.containers.linear import TransposedLinear
from hybrid_engine.containers.tensor_parallel import ALONE, TensorParallel
from hybrid_engine.containers.views import submodule
from hybrid_engine.ops.mlp_gemm import MLPGemmOp
from hybrid_engine.ops.moe_res_matmul import MoEResMatmulOp
from hybrid_engine.ops.vector_matmul import VectorMatMulOp


class ResidualMLP:
    """The dense MLP of a layer, or this rank's part of it, and the linear that computes the coefficients."""

    def __init__(
        self,
        paths: tuple[str, str, str],
        layer: nn.Module,
        activation: str,
        name: str,
        parallel: TensorParallel = ALONE,
    ):
        """`paths` are those of up, down and coefficients.

        Raises UnsupportedModelError if `layer` does not have such linears.
        """
        up, down, coefficient = ((submodule(layer, path), f"{name} {path}", parallel) for path in paths)
        self.size = TransposedLinear(*down).num_inputs
        part = parallel.even(self.size)
        self.linears = [
            TransposedLinear(*up, columns=part),
            TransposedLinear(*down, rows=part),
            TransposedLinear(*coefficient),
        ]
        self.mlp_gemm, self.vector_matmul, self.mix = (
            MLPGemmOp(None, 0.0, activation),
            VectorMatMulOp(),
            MoEResMatmulOp(),
        )

    def forward(self, normed: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Mixes the MLP's output for `normed [N, E]` with the experts' `[N, E]`.

        With several ranks, all are partial sums.
        """
        up, down, coefficient = self.linears
        dense, _ = self.mlp_gemm(normed, None, None, up.pair, down.pair, None, None)
        return self.mix(experts, self.vector_matmul(normed, *coefficient.pair).softmax(-1), dense)
