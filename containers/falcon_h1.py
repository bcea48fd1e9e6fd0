"""Falcon-H1: attention and a state space of Mamba-2 next to each other in every layer, with factors of muP.

    n = norm(x);  x = x + s space(n) + o attention(i n);  x = x + d W_down(act(g W_gate m) * W_up m),  m = norm(x)

s, o, i, g and d are the config's multipliers. Keys have one too, which is a factor of the scores here. Source:
transformers, models/falcon_h1/modeling_falcon_h1.py. N packed tokens, E hidden size.
"""

from dataclasses import replace

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid_engine.containers.bamba import BAMBA
from hybrid_engine.containers.cache import LayerCache, LayerCacheSpec
from hybrid_engine.containers.layer import (
    Attention,
    DenseMLP,
    InferenceLayer,
    LayerMLP,
    RotaryRows,
    read_heads,
)
from hybrid_engine.containers.policy import Policy, attribute, register_policy, submodule
from hybrid_engine.containers.state_space import StateSpace
from hybrid_engine.containers.views import HeadNormsView, NormView, TensorParallel, TransposedLinear
from hybrid_engine.ops import Batch, EncoderBatch, VectorMatMulOp
from hybrid_engine.ops.cpu_kernels import linears_transposed
from hybrid_engine.ops.linears import activate_and_multiply


class AttentionAndSpace(Attention):
    """A LayerMixer: attention and a state space on the same input, whose outputs are scaled and added."""

    @classmethod
    def build(
        cls,
        policy: Policy,
        layer: nn.Module,
        config: PretrainedConfig,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel,
    ) -> "AttentionAndSpace":
        """See MixerPolicy."""
        return cls(policy, layer, config, index, norm, parallel)

    def __init__(
        self,
        policy: Policy,
        layer: nn.Module,
        config: PretrainedConfig,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel,
    ):
        """`norm` is applied before both."""
        assert norm is not None
        heads = read_heads(policy, config, parallel)
        scale = attribute(layer, "self_attn.scaling") * attribute(layer, "self_attn.key_multiplier")
        super().__init__(replace(policy, scale=float(scale)), layer, config, index, None, heads)
        self.space = StateSpace(submodule(layer, "mamba"), f"layer {index} mamba", None, parallel)
        self.cache_spec = LayerCacheSpec(self.cache_spec.kv, self.space.cache_spec.state)
        self.sizes, self.shared_norm = self.space.sizes, norm
        names = ("attention_in_multiplier", "attn_out_multiplier", "ssm_out_multiplier")
        self.factors = tuple(float(attribute(layer, name)) for name in names)

    @property
    def linears(self) -> list[TransposedLinear]:
        """See LayerMixer."""
        return [*super().linears, *self.space.linears]

    @property
    def norms(self) -> list[NormView | HeadNormsView]:
        """See LayerMixer."""
        return [*super().norms, *self.space.norms]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """See LayerMixer."""
        return [*super().tensors, *self.space.tensors]

    def bind(self) -> None:
        """See LayerMixer."""
        super().bind()
        self.space.bind()

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: RotaryRows | None,
        cache: LayerCache,
        batch: Batch | EncoderBatch,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See LayerMixer."""
        factor_in, factor_attention, factor_space = self.factors
        normed = self.shared_norm.apply(hidden)
        space, _ = self.space.forward(normed, None, cache, batch, residual=None)
        attention, _ = super().forward(normed * factor_in, rotary, cache, batch, residual=None)
        output = space * factor_space + attention * factor_attention
        return output if residual is None else residual + output, normed


class ScaledMLP(DenseMLP):
    """A gated MLP with factors of the gate, before its activation, and of the output."""

    def __init__(
        self,
        policy: Policy,
        layer: nn.Module,
        config: PretrainedConfig,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel,
    ):
        super().__init__(policy, layer, config, index, norm, parallel)
        self.gate_factor, self.output_factor = config.mlp_multipliers
        self.activation, self.vector_matmul = getattr(config, policy.activation), VectorMatMulOp()

    def forward(self, input: torch.Tensor, is_added: bool) -> torch.Tensor:
        """See LayerMLP."""
        assert self.norm is not None and self.gate is not None
        gate, up = linears_transposed(self.norm.apply(input), [self.gate.pair, self.up.pair])
        inner = activate_and_multiply(gate * self.gate_factor, up, self.activation)
        output = self.parallel.all_reduce(self.vector_matmul(inner, *self.down.pair)) * self.output_factor
        return input + output if is_added else output


class FalconH1Layer(InferenceLayer):
    """A decoder layer of Falcon-H1 on views."""

    def build_mlp(self, config: PretrainedConfig, norm: NormView | None, parallel: TensorParallel) -> LayerMLP:
        """See InferenceLayer."""
        return ScaledMLP(self.policy, self.module, config, self.index, norm, parallel)


FALCON_H1 = register_policy(
    replace(
        BAMBA,
        layer_class="FalconH1DecoderLayer",
        layer=FalconH1Layer,
        layer_kinds=None,
        mixers={None: AttentionAndSpace},
        embedding_scale="embedding_multiplier",
        logit_scale="lm_head_multiplier",
    )
)
