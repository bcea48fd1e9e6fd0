"""Causal models of transformers as small as `parallelize` can split, and a batch for them."""

from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

CAUSAL_MODELS = ("llama", "qwen2", "gpt2", "opt")


def build_causal(name: str, num_layers: int = 2) -> PreTrainedModel:
    """The model of that name, with four heads, random weights and no dropout."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": num_layers, "num_attention_heads": 4}
    gated = sizes | {"num_key_value_heads": 2, "intermediate_size": 24}
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**gated))
    if name == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**gated))
    if name == "opt":
        return OPTForCausalLM(OPTConfig(**sizes, ffn_dim=24, word_embed_proj_dim=16, dropout=0.0))
    no_dropout = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    assert name == "gpt2", name
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_embd=16, n_layer=num_layers, n_head=4, n_positions=8, **no_dropout)
    )


def causal_batch(generator: torch.Generator | None = None) -> dict[str, Any]:
    """Four rows of six tokens, the first one padded, which are their own labels."""
    ids = torch.randint(0, 32, (4, 6), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}
