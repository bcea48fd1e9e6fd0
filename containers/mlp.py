"""The MLP of a layer: up, or gate and up, activation, down; or a mixture of experts, whose block is in `moe.py`.

N packed tokens, E hidden size, I MLP size.
"""

from typing import Any

import torch
from torch import nn

from hybrid_engine.containers.expert_list import ExpertList
from hybrid_engine.containers.linear import TransposedLinear
from hybrid_engine.containers.moe import MoEBlock, ParameterView
from hybrid_engine.containers.moe_policy import MoEPolicy
from hybrid_engine.containers.policy import Policy, UnsupportedModelError
from hybrid_engine.containers.tensor_parallel import ALONE, Ranges, TensorParallel, join
from hybrid_engine.containers.views import NormView, has_module, submodule
from hybrid_engine.ops import MLPGemmOp
from hybrid_engine.ops.activation import ACTIVATIONS


class DenseMLP:
    """Views and op of one layer's MLP, norm included."""

    def __init__(
        self,
        policy: Policy,
        layer: nn.Module,
        config: Any,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel = ALONE,
    ):
        """`norm` is applied before the MLP; None: no norm."""

        def linear(path: str, columns: Ranges | None = None, rows: Ranges | None = None) -> TransposedLinear:
            return TransposedLinear(submodule(layer, path), f"layer {index} {path}", parallel, columns, rows)

        self.norm, self.parallel = norm, parallel
        self.is_fused_gate = policy.gate == policy.up
        size = linear(policy.down).num_inputs
        part = parallel.even(size)
        self.sizes = [size]
        self.up = linear(policy.up, columns=join(part, parallel.even(size, size)) if self.is_fused_gate else part)
        self.down = linear(policy.down, rows=part)
        self.gate = linear(policy.gate, columns=part) if policy.gate and not self.is_fused_gate else None
        activation = getattr(config, policy.activation, policy.activation)
        if activation not in ACTIVATIONS:
            raise UnsupportedModelError(f"activation {activation!r}; known are {', '.join(ACTIVATIONS)}")
        kind, eps = (norm.kind, norm.eps) if norm else (None, 0.0)
        self.mlp_gemm = MLPGemmOp(kind, eps, activation)
        self.mlp_gemm_adding = MLPGemmOp(kind, eps, activation, adds_residual=True)

    @property
    def linears(self) -> list[TransposedLinear]:
        """All linears of the MLP."""
        return [*([self.gate] if self.gate else []), self.up, self.down]

    @property
    def adaptable(self) -> list[TransposedLinear]:
        """Linears that adapters may be on."""
        return self.linears

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors other than linears and norms that a forward pass reads."""
        return []

    def bind(self) -> None:
        """Points all views at the parameters' current memory, unfused; except `norm`, which is the layer's."""
        for linear in self.linears:
            linear.bind()

    def forward(self, input: torch.Tensor, is_added: bool) -> torch.Tensor:
        """`input [N, E]` -> the output `[N, E]`, added to `input` if `is_added`."""
        gate, up = (self.gate.pair if self.gate else None), self.up.pair
        if self.is_fused_gate:
            weight, bias = up
            size = weight.shape[1] // 2
            gate, up = (
                (weight[:, part], None if bias is None else bias[part]) for part in (slice(size), slice(size, None))
            )
        gamma, beta = (self.norm.gamma, self.norm.beta) if self.norm else (None, None)
        op = self.mlp_gemm_adding if is_added and self.parallel.size == 1 else self.mlp_gemm
        output = op(input, None, gate, up, self.down.pair, gamma, beta)[0]
        if self.parallel.size == 1:
            return output
        output = self.parallel.all_reduce(output)
        return input + output if is_added else output


class MoEMLP:
    """A mixture of experts in place of the MLP, norm included."""

    def __init__(
        self,
        policy: Policy,
        layer: nn.Module,
        config: Any,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel = ALONE,
    ):
        """`norm` is applied before the block; None: no norm."""
        assert policy.moe is not None
        self.norm, self.block = norm, MoEBlock(policy.moe, layer, config, f"layer {index}", parallel)
        self.sizes = self.block.sizes

    @staticmethod
    def is_in(policy: MoEPolicy, layer: nn.Module) -> bool:
        """Whether this layer has a mixture of experts; models may mix layers with and without."""
        return has_module(layer, policy.router)

    @property
    def linears(self) -> list[TransposedLinear]:
        """All linears; stacked experts are parameters, not linears."""
        return [part for part in self.block.parts if isinstance(part, TransposedLinear)]

    @property
    def adaptable(self) -> list[ParameterView | ExpertList | TransposedLinear]:
        """Parts that adapters may be on."""
        return self.block.parts

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors other than linears and norms that a forward pass reads."""
        parts = [part for part in self.block.parts if not isinstance(part, TransposedLinear)]
        return [tensor for part in parts for tensor in part.tensors]

    def bind(self) -> None:
        """Points all views at the parameters' current memory, unfused; except `norm`, which is the layer's."""
        self.block.bind()

    def forward(self, input: torch.Tensor, is_added: bool) -> torch.Tensor:
        """`input [N, E]` -> the output `[N, E]`, added to `input` if `is_added`."""
        normed = self.norm.apply(input) if self.norm else input
        return self.block.forward(normed, input if is_added else None)
