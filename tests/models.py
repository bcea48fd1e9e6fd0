"""Small random models of every family with a policy, with their special features switched on."""

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 99
PAD = 0
_SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
_GQA = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 80}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}

BUILDERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_GQA)),
    "llama-mha-tied": lambda: LlamaForCausalLM(
        LlamaConfig(**{**_GQA, "num_key_value_heads": 4}, tie_word_embeddings=True)
    ),
    "llama-biases-llama3-rope": lambda: LlamaForCausalLM(
        LlamaConfig(**_GQA, attention_bias=True, mlp_bias=True, rope_parameters=_LLAMA3_ROPE)
    ),
    "llama-yarn-rope": lambda: LlamaForCausalLM(LlamaConfig(**_GQA, rope_parameters=_YARN_ROPE)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**_GQA, sliding_window=5)),
    "qwen2-biases": lambda: Qwen2ForCausalLM(Qwen2Config(**_GQA)),
    "qwen2-mixed-windows": lambda: Qwen2ForCausalLM(
        Qwen2Config(**_GQA, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    ),
    "qwen3-qk-norm": lambda: Qwen3ForCausalLM(Qwen3Config(**_GQA, head_dim=16)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            n_embd=48, n_layer=2, n_head=4, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2,
            scale_attn_by_inverse_layer_idx=True,
        )
    ),
    "opt": lambda: OPTForCausalLM(OPTConfig(**_SIZES, ffn_dim=80, word_embed_proj_dim=48)),
}  # fmt: skip


def build_model(family: str = "llama", seed: int = 0) -> PreTrainedModel:
    """A model whose next-token distributions are peaked enough for greedy ties not to occur."""
    torch.manual_seed(seed)
    model = BUILDERS[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(torch.randn_like(parameter) * 0.05)
    model.generation_config.pad_token_id = PAD
    return model.eval()


def padded_prompts(seed: int = 1, num_prompts: int = 6, width: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded random prompts of mixed lengths and their mask."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCAB, (num_prompts, width), generator=generator)
    mask = torch.ones_like(input_ids)
    for row, padding in enumerate([0, 3, width - 1, 1, 0, 5][:num_prompts]):
        mask[row, :padding] = 0
        input_ids[row, :padding] = PAD
    return input_ids, mask


def module_logprobs(model, sequences: torch.Tensor, mask: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the responses by one forward pass of the model itself, `[B, T]`."""
    width = mask.shape[1]
    full = torch.cat([mask, torch.ones_like(sequences[:, width:])], dim=1)
    positions = (full.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(sequences, attention_mask=full, position_ids=positions).logits[:, width - 1 : -1]
    logprobs = (logits.double() / temperature).log_softmax(-1)
    return logprobs.gather(-1, sequences[:, width:, None]).squeeze(-1)
