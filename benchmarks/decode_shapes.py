"""The models that bench_decode.py runs: real shapes with random weights, and small ones for a CPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)


@dataclass(frozen=True)
class DecodeShape:
    """A model's configuration, made for sequences of at most `positions` tokens."""

    name: str
    config: Callable[[int], object]
    model: type[PreTrainedModel]

    def build(self, positions: int, dtype: torch.dtype, device: str) -> PreTrainedModel:
        """Random weights, made on the device in their dtype."""
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                return self.model(self.config(positions)).eval()
        finally:
            torch.set_default_dtype(before)


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int, **options):
    return lambda positions: LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=mlp, vocab_size=vocab, max_position_embeddings=positions, **options,
    )  # fmt: skip


def _qwen(hidden: int, layers: int, heads: int, mlp: int):
    return lambda positions: Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=2,
        intermediate_size=mlp, vocab_size=151_936, max_position_embeddings=positions, tie_word_embeddings=True,
    )  # fmt: skip


def _opt(hidden: int, layers: int, heads: int, vocab: int):
    return lambda positions: OPTConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, ffn_dim=4 * hidden,
        word_embed_proj_dim=hidden, vocab_size=vocab, max_position_embeddings=positions,
    )  # fmt: skip


SHAPES = {
    shape.name: shape
    for shape in (
        DecodeShape("llama-8b", _llama(4096, 32, 32, 8, 14_336, 128_256), LlamaForCausalLM),
        DecodeShape("opt-1.3b", _opt(2048, 24, 32, 50_272), OPTForCausalLM),
        DecodeShape("qwen-1.5b", _qwen(1536, 28, 12, 8960), Qwen2ForCausalLM),
        DecodeShape("qwen-0.5b", _qwen(896, 24, 14, 4864), Qwen2ForCausalLM),
        DecodeShape("llama-16m", _llama(384, 6, 6, 6, 1024, 8192), LlamaForCausalLM),
        DecodeShape("opt-3m", _opt(128, 4, 4, 4096), OPTForCausalLM),
    )
}


@dataclass(frozen=True)
class Goal:
    """What the decode step is meant to reach on one H100, in bf16."""

    shape: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    share: float | None = None  # of the measured memory bandwidth
    deepspeed_tokens: float | None = None  # per second, which `times` multiplies
    times: float = 1.0
    eager: float | None = None  # times transformers' generate() in eager mode
    compiled: float | None = None  # times its static-cache compiled mode


# DeepSpeed's published figures for OPT-1.3B on one H100, 256 prompt and 128 new tokens, by batch: eager, and at 8 rows
# with CUDA graphs (1,549 without). Source: pull request 8271 of deepspeedai/DeepSpeed.
DEEPSPEED_OPT = {1: 200, 4: 785, 8: 2840, 16: 2865, 32: 5956}
GOALS = [
    Goal("llama-8b", 1, 256, 128, share=0.65),
    Goal("opt-1.3b", 1, 256, 128, share=0.65, deepspeed_tokens=DEEPSPEED_OPT[1], times=3.5),
    *(Goal("opt-1.3b", batch, 256, 128, deepspeed_tokens=DEEPSPEED_OPT[batch]) for batch in (4, 8, 16)),
    Goal("opt-1.3b", 32, 256, 128, deepspeed_tokens=DEEPSPEED_OPT[32], times=2.0),
    Goal("qwen-1.5b", 64, 2048, 64, share=0.70),
    Goal("qwen-0.5b", 1, 256, 128, share=0.40, eager=8.0, compiled=1.5),
]
