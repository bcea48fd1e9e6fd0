"""The mixture-of-experts blocks of transformers, small and random, as decoder layers with an `mlp`."""

import torch
from torch import nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    Mistral4Config,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mistral4.modeling_mistral4 import Mistral4MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from hybrid_engine.containers.deepseek import (
    DEEPSEEK_V2_GROUPED_MOE,
    DEEPSEEK_V2_MOE,
    DEEPSEEK_V3_MOE,
    MISTRAL4_MOE,
)
from hybrid_engine.containers.gpt_oss import GPT_OSS
from hybrid_engine.containers.mistral import MIXTRAL
from hybrid_engine.containers.qwen import QWEN2_MOE, QWEN3_MOE

_SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 50}
_DEEPSEEK = {
    **_SIZES, "n_routed_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_shared_experts": 2,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
_QWEN = {**_SIZES, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
FAMILIES = {
    "mixtral": (
        lambda: MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2, intermediate_size=40),
        MixtralSparseMoeBlock, MIXTRAL.moe,
    ),
    "qwen2-moe": (
        lambda: Qwen2MoeConfig(**_QWEN, shared_expert_intermediate_size=20, norm_topk_prob=False),
        Qwen2MoeSparseMoeBlock, QWEN2_MOE.moe,
    ),
    "qwen3-moe": (lambda: Qwen3MoeConfig(**_QWEN, norm_topk_prob=True), Qwen3MoeSparseMoeBlock, QWEN3_MOE.moe),
    "qwen3-moe-unnormalised": (
        lambda: Qwen3MoeConfig(**_QWEN, norm_topk_prob=False), Qwen3MoeSparseMoeBlock, QWEN3_MOE.moe,
    ),
    "gpt-oss": (
        lambda: GptOssConfig(**_SIZES, num_local_experts=6, num_experts_per_tok=4, intermediate_size=40),
        GptOssMLP, GPT_OSS.moe,
    ),
    "deepseek-v3": (lambda: DeepseekV3Config(**_DEEPSEEK), DeepseekV3MoE, DEEPSEEK_V3_MOE),
    "deepseek-v2": (lambda: DeepseekV2Config(**_DEEPSEEK), DeepseekV2Moe, DEEPSEEK_V2_MOE),
    "deepseek-v2-groups": (
        lambda: DeepseekV2Config(**_DEEPSEEK, topk_method="group_limited_greedy"), DeepseekV2Moe,
        DEEPSEEK_V2_GROUPED_MOE,
    ),
    "mistral4": (lambda: Mistral4Config(**_DEEPSEEK), Mistral4MoE, MISTRAL4_MOE),
}  # fmt: skip


class Layer(nn.Module):
    """What a decoder layer is to the block: the owner of `mlp`."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self.mlp(hidden)
        return output[0] if isinstance(output, tuple) else output


def build_block(family: str, experts_implementation: str = "eager", seed: int = 0):
    """A layer with random weights large enough for the clamps of gpt-oss to bite, its config and its policy."""
    torch.manual_seed(seed)
    build_config, block_class, policy = FAMILIES[family]
    config = build_config()
    config._experts_implementation = experts_implementation
    layer = Layer(block_class(config)).eval().requires_grad_(False)
    for parameter in layer.parameters():
        parameter.copy_(
            torch.randn_like(parameter) * (2.0 if family == "gpt-oss" else 1.0) * parameter.shape[-1] ** -0.5
        )
    for buffer in layer.buffers():  # a bias that only chooses
        buffer.copy_(torch.randn_like(buffer) / 4)
    return layer, config, policy


def run_block(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The module's own output `[N, E]` for `hidden [N, E]`."""
    with torch.no_grad():
        return layer(hidden[None])[0]
