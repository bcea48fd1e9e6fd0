"""The mixture-of-experts blocks of transformers, small and random, as decoder layers with an `mlp`."""

import torch
from torch import nn
from transformers import GptOssConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from hybrid_engine.containers.gpt_oss import GPT_OSS
from hybrid_engine.containers.mistral import MIXTRAL
from hybrid_engine.containers.qwen import QWEN2_MOE, QWEN3_MOE

_SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 50}
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
    return layer, config, policy


def run_block(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The module's own output `[N, E]` for `hidden [N, E]`."""
    with torch.no_grad():
        return layer(hidden[None])[0]
