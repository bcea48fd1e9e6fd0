"""Small random models of every family with a policy, and what tests of rollouts share."""

from collections.abc import Callable

import torch
import transformers as hf

from tests.support.model_families import BUILDERS, MORE_BUILDERS, VOCAB

PAD = 0
WIDE_VOCAB = 509
_IDS = {"vocab_size": WIDE_VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD}
_SIZES = {**_IDS, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 352}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_LATENT = {"q_lora_rank": 64, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
_SHARED = {"n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
# Norms, activations, heads, positions, experts, states and latents, at sizes that fill a kernel's tiles.
WIDE_FAMILIES = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GROUPED)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**_IDS, n_embd=256, n_layer=2, n_head=4)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**_GROUPED, head_dim=64, sliding_window=64, query_pre_attn_scalar=64)
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    ),
    "falcon": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(**_IDS, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, alibi=True,
                        multi_query=False, parallel_attn=False)
    ),
    "qwen3.5": lambda: hf.Qwen3_5ForCausalLM(
        hf.Qwen3_5TextConfig(**_GROUPED, **_DELTA, head_dim=64, layer_types=["linear_attention", "full_attention"])
    ),
    "deepseek-v3": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(**_SIZES, **_LATENT, **_SHARED, num_key_value_heads=4, n_routed_experts=4,
                            num_experts_per_tok=2, moe_intermediate_size=128)
    ),
}  # fmt: skip


def build_model(family: str = "llama", seed: int = 0) -> hf.PreTrainedModel:
    """A family's model."""
    return randomised((BUILDERS | MORE_BUILDERS)[family], seed)


def randomised(build: Callable[[], hf.PreTrainedModel], seed: int = 0) -> hf.PreTrainedModel:
    """A model whose next-token distributions are peaked enough for greedy ties not to occur."""
    torch.manual_seed(seed)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(torch.randn_like(parameter) * 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # which only chooses experts
                buffer.add_(torch.randn_like(buffer) * 0.2)
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
