"""Projection, GELU, projection: `y = gelu(x W + b) Wout`, DeepSpeed's `fused_gemm_gelu`.

Both GELUs: "gelu" is the exact one (erf), "gelu_new" the tanh approximation (`activation.py`). Moves both
weights once, 2 E I elements, and does 4 N E I operations.
"""

import torch

from hybrid_engine.ops.activation import ACTIVATIONS
from hybrid_engine.ops.cpu_gemm import linear_transposed
from hybrid_engine.ops.dispatch import use_triton
from hybrid_engine.ops.mlp_gemm import up_product
from hybrid_engine.ops.skinny_gemm import takes_rows
from hybrid_engine.ops.vector_matmul import VectorMatMulOp

GELUS = ("gelu", "gelu_new")


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
        return self.output(up_product(input, None, (weight, bias), self.activation_name), weight_out)

    def reference(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, weight_out: torch.Tensor
    ) -> torch.Tensor:
        """The same function in torch."""
        return self.output.reference(self.activation(linear_transposed(input, weight, bias)), weight_out)
