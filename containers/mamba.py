"""Mamba-2 and Nemotron-H: each layer is one part alone, `x = x + part(norm(x))`.

Every part of Mamba-2 is a state space. Its config may keep the sum x in fp32 in a model of 16 bits. Nemotron-H has
state spaces, attention without rope, MLPs and mixtures of experts; the experts are not gated, may see a narrower
vector, and are routed as in DeepSeek-V3. Sources: transformers, models/{mamba2,nemotron_h}/modeling_*.py.

transformers' own decode steps of Nemotron-H do not clamp the time step from below, as its forward passes do; here it is
clamped everywhere.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid_engine.containers.cache import LayerCache
from hybrid_engine.containers.deepseek import DEEPSEEK_V3_MOE
from hybrid_engine.containers.layer import InferenceLayer, RotaryRows
from hybrid_engine.containers.policy import Policy, register_policy
from hybrid_engine.containers.state_space import StateSpacePolicy
from hybrid_engine.containers.views import EmbeddingView, NormView, TensorParallel, TransposedLinear
from hybrid_engine.ops import Batch, EncoderBatch


class WideStream:
    """A LayerStream: the hidden state `[N, E]` in fp32."""

    def __init__(self, policy: Policy, base: Any, decoder: nn.Module, parallel: TensorParallel):
        self.linears: list[TransposedLinear] = []
        self.views: list[NormView | EmbeddingView] = []
        self.width, self.dtype = base.config.hidden_size, torch.float32

    @staticmethod
    def is_in(config: PretrainedConfig) -> bool:
        """See LayerStream."""
        return bool(getattr(config, "residual_in_fp32", False))

    def enter(self, tokens: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """See LayerStream."""
        self.dtype = embedded.dtype
        return embedded.to(torch.promote_types(embedded.dtype, torch.float32))

    def leave(self, stream: torch.Tensor) -> torch.Tensor:
        """See LayerStream."""
        return stream.to(self.dtype)


class WideLayer(InferenceLayer):
    """A layer that is a mixer alone, on a hidden state that may be wider than the weights."""

    def run(
        self, hidden: torch.Tensor, rotary: RotaryRows | None, cache: LayerCache, batch: Batch | EncoderBatch
    ) -> torch.Tensor:
        """See InferenceLayer."""
        assert self.attention_norm
        narrow = hidden.to(self.attention_norm.gamma.dtype)
        output, _ = self.mixer.forward(narrow, rotary, cache, batch, residual=None)
        return hidden + output


NEMOTRON_H = register_policy(
    Policy(
        layer_class="NemotronHBlock",
        norm="rms_fp32",
        attention_norm="norm",
        mlp_norm="norm",
        final_norm="norm_f",
        layer_kinds="layers_block_type",
        mixers={"linear_attention": StateSpacePolicy(mixer="mixer")},
        mlp_kinds=("mlp", "moe"),
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        attention_output="mixer.o_proj",
        up="mixer.up_proj",
        down="mixer.down_proj",
        activation="mlp_hidden_act",
        moe=replace(
            DEEPSEEK_V3_MOE,
            router="mixer.gate",
            choice_bias="mixer.gate.e_score_correction_bias",
            experts="mixer.experts",
            up="up_proj",
            layout="plain",
            activation="mlp_hidden_act",
            shared=(None, "mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
            latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
        ),
    )
)

MAMBA2 = register_policy(
    replace(
        NEMOTRON_H,
        layer_class="Mamba2Block",
        layer=WideLayer,
        stream=WideStream,
        norm="rms",
        layer_kinds=None,
        mixers={None: StateSpacePolicy(mixer="mixer")},
        mlp_kinds=(),
        moe=None,
    )
)
