"""One model of every family on containers, with random weights, of one size."""

from collections.abc import Callable

import torch
import transformers as hf
from transformers import PreTrainedModel

VOCAB = 4096


def build_families(hidden: int, layers: int, positions: int) -> dict[str, Callable[[], PreTrainedModel]]:
    """Builders by name; 8 heads of `hidden / 8`, MLPs of 4 * `hidden` where plain and 3 where gated."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    common = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 8, "vocab_size": VOCAB, **ids}
    gated = {**common, "intermediate_size": hidden * 3, "num_key_value_heads": 4,
             "max_position_embeddings": positions}  # fmt: skip
    wide = {**common, "intermediate_size": hidden * 4, "max_position_embeddings": positions}
    gpt = {"n_embd": hidden, "n_layer": layers, "n_head": 8, "vocab_size": VOCAB, "n_positions": positions, **ids}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": hidden, "num_experts": 8}
    head = {"head_dim": hidden // 8}
    every_other = [("linear_attention", "full_attention")[index % 2] for index in range(layers)]
    return {
        "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**gated)),
        "Mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**gated, sliding_window=64)),
        "Mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**gated, num_local_experts=8)),
        "Qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**gated)),
        "Qwen2-MoE": lambda: hf.Qwen2MoeForCausalLM(
            hf.Qwen2MoeConfig(**gated, **experts, shared_expert_intermediate_size=hidden)
        ),
        "Qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**gated, **head)),
        "Qwen3-MoE": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**gated, **head, **experts)),
        "Gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**gated, **head)),
        "Gemma 2": lambda: hf.Gemma2ForCausalLM(
            hf.Gemma2Config(**gated, **head, sliding_window=64, attn_implementation="eager")
        ),
        "Gemma 3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**gated, **head, sliding_window=64)),
        "Phi-3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**gated)),
        "GPT-2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt)),
        "GPT-Neo": lambda: hf.GPTNeoForCausalLM(
            hf.GPTNeoConfig(
                hidden_size=hidden,
                num_layers=layers,
                num_heads=8,
                vocab_size=VOCAB,
                window_size=64,
                attention_types=[[["global", "local"], layers // 2]],
                max_position_embeddings=positions,
                **ids,
            )
        ),
        "GPT-J": lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**gpt, rotary_dim=hidden // 16)),
        "GPT-NeoX": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**wide)),
        "OPT": lambda: hf.OPTForCausalLM(
            hf.OPTConfig(**common, ffn_dim=hidden * 4, word_embed_proj_dim=hidden, max_position_embeddings=positions)
        ),
        "BLOOM": lambda: hf.BloomForCausalLM(
            hf.BloomConfig(hidden_size=hidden, n_layer=layers, n_head=8, vocab_size=VOCAB, **ids)
        ),
        "Falcon": lambda: hf.FalconForCausalLM(hf.FalconConfig(**common, max_position_embeddings=positions)),
        "StableLM": lambda: hf.StableLmForCausalLM(hf.StableLmConfig(**gated)),
        "OLMo-2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**gated)),
        "SmolLM3": lambda: hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**gated)),
        "LFM2": lambda: hf.Lfm2ForCausalLM(
            hf.Lfm2Config(
                **gated,
                layer_types=[kind.replace("linear_attention", "conv") for kind in every_other],
                block_auto_adjust_ff_dim=False,
            )
        ),
        "Qwen3.5": lambda: hf.Qwen3_5ForCausalLM(
            hf.Qwen3_5TextConfig(
                **gated,
                **head,
                layer_types=every_other,
                linear_num_key_heads=4,
                linear_num_value_heads=8,
                linear_key_head_dim=hidden // 8,
                linear_value_head_dim=hidden // 8,
            )
        ),
        "Granite 4": lambda: hf.GraniteMoeHybridForCausalLM(
            hf.GraniteMoeHybridConfig(
                **gated,
                layer_types=every_other,
                mamba_n_heads=8,
                mamba_d_state=hidden // 8,
                num_local_experts=0,
                shared_intermediate_size=hidden * 3,
            )
        ),
        "DeepSeek-V3": lambda: hf.DeepseekV3ForCausalLM(
            hf.DeepseekV3Config(
                **{**gated, "num_key_value_heads": 8},
                q_lora_rank=hidden // 2,
                kv_lora_rank=hidden // 4,
                qk_nope_head_dim=hidden // 8,
                qk_rope_head_dim=hidden // 16,
                v_head_dim=hidden // 8,
                n_routed_experts=8,
                n_group=4,
                topk_group=2,
                num_experts_per_tok=2,
                moe_intermediate_size=hidden,
                first_k_dense_replace=1,
            )
        ),
        "Gemma 4": lambda: hf.Gemma4ForCausalLM(
            hf.Gemma4TextConfig(
                **gated,
                **head,
                global_head_dim=hidden // 4,
                layer_types=[kind.replace("linear", "sliding") for kind in every_other],
                sliding_window=64,
                num_kv_shared_layers=layers // 2 if layers > 2 else 0,  # each kind has a layer of its own
                hidden_size_per_layer_input=hidden // 8,
                vocab_size_per_layer_input=VOCAB,
            )
        ),
        "gpt-oss": lambda: hf.GptOssForCausalLM(
            hf.GptOssConfig(
                **{**gated, "intermediate_size": hidden},
                **head,
                num_local_experts=8,
                num_experts_per_tok=2,
                sliding_window=64,
            )
        ),
    }


def build(make: Callable[[], PreTrainedModel], dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A model that never draws an end of sequence by greedy choice alone is not needed: callers switch it off."""
    torch.manual_seed(0)
    return make().to(device, dtype).eval()
