"""Configurations of every family, small, with its special features switched on; built by `models.build_model`.

Every test of families runs all BUILDERS: one family of each kind of layer. `containers/test_more_families.py` alone
runs MORE_BUILDERS, whose layers combine parts that one of BUILDERS has too. FEATURES names what each switches on.
"""

from collections.abc import Callable

import transformers as hf

VOCAB = 99
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB, **_IDS}
_GQA = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 80}
_WIDE = {**_SIZES, "intermediate_size": 80}
_GPT = {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, **_IDS}
_LOCAL = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GROUPS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
_M2 = {
    "head_dim": 12,
    "intermediate_size": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 40}
_NO_WIDTH = {name: value for name, value in _GQA.items() if name != "intermediate_size"}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
_FALLING = {"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.4,
    "logits_scaling": 0.8,
}
_SPACE = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 8}
_SPACE_FIRST = {**_SPACE, "layer_types": ["linear_attention", "full_attention"]}
_MAMBA2 = {
    **_IDS, "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_heads": 6, "head_dim": 16,
    "state_size": 16, "n_groups": 2, "chunk_size": 8, "initializer_range": 0.02,
}  # fmt: skip
_H1_FACTORS = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.3,
    "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 0.7,
    "mlp_multipliers": [0.6, 1.4],
    "ssm_multipliers": [0.8, 1.2, 0.7, 1.3, 0.5],
}
_H1 = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}
_DELTA_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
_L4 = {
    "head_dim": 12,
    "intermediate_size": 24,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "attention_chunk_size": 6,
    "no_rope_layers": [1, 0, 1],
    "floor_scale": 64,
}
_NEMOTRON = {
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 8,
    "time_step_min": 1e-6,  # below which transformers' decode steps differ from its forward passes
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
LATENT = {
    **_WIDE, "kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 1.7, "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
_LATENT_YARN = {**_YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 1.2}
_DENSE_FIRST = {"first_k_dense_replace": 1}
# Releases before 5.18 change these frequencies with the length of a sequence.
_HAS_FIXED_ALPHA = tuple(map(int, hf.__version__.split(".")[:2])) >= (5, 18)
_ALPHA_ROPE = {**_PLAIN_ROPE, "rope_type": "dynamic", "factor": 1.0, "alpha": 9.0} if _HAS_FIXED_ALPHA else _PLAIN_ROPE

_LATENT_SIZES = {
    **_SIZES,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_INDEXER = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}


def _present(families: dict[str, tuple[str, dict]]) -> dict[str, Callable[[], hf.PreTrainedModel]]:
    """Builders of the families, class prefix and options of each, that this release of transformers has."""

    def builder(prefix, options):
        def build():
            model_class = getattr(hf, f"{prefix}ForCausalLM")
            return model_class(model_class.config_class(**options))

        return build

    names = set(dir(hf))
    return {
        family: builder(prefix, options)
        for family, (prefix, options) in families.items()
        if f"{prefix}ForCausalLM" in names
    }


def _falcon(**options):
    heads = {"num_attention_heads": 6 if options.get("alibi") else 4}  # six heads have slopes of two series
    return lambda: hf.FalconForCausalLM(hf.FalconConfig(**{**_SIZES, **heads}, **options))


def _stablelm(**options):
    return lambda: hf.StableLmForCausalLM(hf.StableLmConfig(**{**_GQA, "hidden_size": 64}, **options))


def _neox(**options):
    return lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_WIDE, **options))


_GEMMA4 = {
    **_GQA,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
    "head_dim": 16,
    "final_logit_softcapping": 9.0,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
}


def scaled(model):
    """A Gemma whose scores, which are not scaled, and layers are no larger than those of a trained one."""
    for name, tensor in model.state_dict().items():
        if name.endswith("q_norm.weight"):
            tensor.mul_(0.1)
        elif name.endswith("layer_scalar"):
            tensor.fill_(0.8)
    return model


def _gemma4(**options):
    options = {**_GEMMA4, "global_head_dim": 24, **options}
    return lambda: scaled(hf.Gemma4ForCausalLM(hf.Gemma4TextConfig(**options)))


BUILDERS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GQA)),
    "llama-mha-tied": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**{**_GQA, "num_key_value_heads": 4}, tie_word_embeddings=True)
    ),
    "llama-biases-llama3-rope": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**_GQA, attention_bias=True, mlp_bias=True, rope_parameters=_LLAMA3_ROPE)
    ),
    "llama-yarn-rope": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GQA, rope_parameters=_YARN_ROPE)),
    "llama-linear-rope": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GQA, rope_parameters=_LINEAR_ROPE)),
    "mistral-window": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_GQA, sliding_window=5)),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**_GQA, sliding_window=5, num_local_experts=4, num_experts_per_tok=2)
    ),
    "qwen2-biases": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_GQA)),
    "qwen2-mixed-windows": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**_GQA, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    ),
    "qwen2-moe": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(**_GQA, **_EXPERTS, shared_expert_intermediate_size=40, mlp_only_layers=[1])
    ),
    "qwen3-qk-norm": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_GQA, head_dim=16)),
    "qwen3-moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**_GQA, **_EXPERTS, head_dim=16, norm_topk_prob=True)
    ),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**_GQA, head_dim=16)),
    # transformers' SDPA attention leaves the soft-capping out; its eager attention has it.
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(
            **_GQA,
            **_LOCAL,
            head_dim=16,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=9.0,
            attn_implementation="eager",
        )
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**_GQA, **_LOCAL, head_dim=16, query_pre_attn_scalar=20)
    ),
    "gemma4": _gemma4(use_double_wide_mlp=True),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**_GQA, sliding_window=5)),
    "phi4-partial-rope": lambda: hf.Phi3ForCausalLM(
        hf.Phi3Config(
            **_GQA,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        )
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**_GPT, scale_attn_by_inverse_layer_idx=True)),
    "gpt-neo-local": lambda: hf.GPTNeoForCausalLM(
        hf.GPTNeoConfig(
            hidden_size=48,
            num_layers=2,
            num_heads=4,
            vocab_size=VOCAB,
            window_size=4,
            intermediate_size=80,
            attention_types=[[["global", "local"], 1]],
            **_IDS,
        )
    ),
    "gptj": lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**_GPT, rotary_dim=8)),
    "gpt-neox-parallel": _neox(),
    "gpt-neox-sequential": _neox(use_parallel_residual=False),
    "opt": lambda: hf.OPTForCausalLM(hf.OPTConfig(**_SIZES, ffn_dim=80, word_embed_proj_dim=48)),
    "opt-post-norm-projection": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(**_SIZES, ffn_dim=80, word_embed_proj_dim=32, do_layer_norm_before=False)
    ),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(hidden_size=48, n_layer=2, n_head=6, vocab_size=VOCAB, **_IDS)),
    "falcon-multi-query": _falcon(),
    "falcon-alibi-sequential": _falcon(alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "falcon-new-two-norms": _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon-new-one-norm": _falcon(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "stablelm": _stablelm(use_qkv_bias=True),
    "stablelm-parallel-head-norms": _stablelm(use_parallel_residual=True, qk_layernorm=True),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**_GQA)),
    "smollm3-some-rope": lambda: hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**_GQA, no_rope_layers=[1, 0])),
    "lfm2": lambda: hf.Lfm2ForCausalLM(
        hf.Lfm2Config(
            **_GQA,
            layer_types=["conv", "full_attention"],
            conv_L_cache=4,
            block_auto_adjust_ff_dim=False,
        )
    ),
    "qwen3.5": lambda: hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**_GQA, **_DELTA, head_dim=16)),
    "gpt-oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **{**_GQA, "intermediate_size": 32}, **_LOCAL, head_dim=16, num_local_experts=4, num_experts_per_tok=2
        )
    ),
    "deepseek-v3": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(**LATENT, **_DENSE_FIRST, rope_parameters=_LATENT_YARN)
    ),
}

MORE_BUILDERS = _present(
    {
        "deepseek-v3-halves": (
            "DeepseekV3",
            {**LATENT, **_DENSE_FIRST, "q_lora_rank": None, "rope_interleave": False, "attention_bias": True},
        ),
        "deepseek-v2": (
            "DeepseekV2",
            {**LATENT, **_DENSE_FIRST, "topk_method": "group_limited_greedy", "rope_parameters": _LATENT_YARN},
        ),
        "deepseek-v2-lite": ("DeepseekV2", {**LATENT, **_DENSE_FIRST, "q_lora_rank": None}),
        "glm4-moe-lite": ("Glm4MoeLite", LATENT),
        "mistral4": (
            "Mistral4",
            {
                **LATENT,
                "rope_parameters": {
                    **_YARN_ROPE,
                    "original_max_position_embeddings": 6,
                    "llama_4_scaling_beta": 0.3,
                    "partial_rotary_factor": 0.5,
                },
            },
        ),
        "seed-oss": ("SeedOss", {**_GQA, "head_dim": 16, "attention_bias": True, "mlp_bias": True}),
        "cwm": ("Cwm", {**_GQA, **_LOCAL, "head_dim": 12, "rope_parameters": _LLAMA3_ROPE}),
        "arcee": ("Arcee", {**_GQA, "mlp_bias": True, "rope_parameters": _YARN_ROPE}),
        "ministral": ("Ministral", {**_GQA, **_LOCAL, "head_dim": 16}),
        "olmo3": (
            "Olmo3",
            {**_GQA, **_LOCAL, "rope_parameters": {"sliding_attention": _PLAIN_ROPE, "full_attention": _YARN_ROPE}},
        ),
        "glm": ("Glm", {**_GQA, "head_dim": 16, "attention_bias": True}),
        "glm4": ("Glm4", {**_GQA, "head_dim": 16, "attention_bias": True}),
        "ernie4_5": ("Ernie4_5", {**_GQA, "head_dim": 16, "use_bias": True}),
        "helium": ("Helium", {**_GQA, "head_dim": 12}),
        "starcoder2": ("Starcoder2", {**_GQA, "sliding_window": 5}),
        "phi": ("Phi", _GQA),
        "ministral3": ("Ministral3", {**_GQA, "head_dim": 16, "rope_parameters": {**_YARN_ROPE, **_FALLING}}),
        "nanochat": ("NanoChat", {**_GQA, "final_logit_softcapping": 9.0}),
        "granite": ("Granite", {**_GQA, **_MULTIPLIERS}),
        "exaone4": ("Exaone4", {**_GQA, **_LOCAL}),
        "hunyuan": ("HunYuanDenseV1", {**_GQA, "head_dim": 16, "rope_parameters": _ALPHA_ROPE}),
        "cohere": ("Cohere", {**_GQA, "logit_scale": 0.5}),
        "cohere-head-norms": ("Cohere", {**_GQA, "use_qk_norm": True}),
        "cohere2": ("Cohere2", {**_GQA, **_LOCAL}),
        "apertus": ("Apertus", {**_GQA, "rope_parameters": _LLAMA3_ROPE}),
        "glm4-moe": ("Glm4Moe", {**_GQA, **_GROUPS}),
        "glm4-moe-head-norms": ("Glm4Moe", {**_GQA, **_GROUPS, "use_qk_norm": True, "attention_bias": True}),
        "minimax-m2": ("MiniMaxM2", {**_GQA, **_M2, "num_local_experts": 4, "num_experts_per_tok": 2}),
        "olmoe": ("Olmoe", {**_GQA, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}),
        "qwen3-next": ("Qwen3Next", {**_GQA, **_DELTA, **_SHARED_EXPERT, "head_dim": 16, "mlp_only_layers": [1]}),
        "qwen3.5-moe": ("Qwen3_5Moe", {**_NO_WIDTH, **_DELTA, **_SHARED_EXPERT, "head_dim": 16}),
        "olmo-hybrid": ("OlmoHybrid", {**_GQA, **_DELTA, "rope_parameters": None}),
        "granite4": (
            "GraniteMoeHybrid",
            {**_GQA, **_MULTIPLIERS, **_SPACE_FIRST, "num_local_experts": 0, "shared_intermediate_size": 40},
        ),
        "granite4-moe": (
            "GraniteMoeHybrid",
            {
                **_GQA,
                **_SPACE_FIRST,
                "num_local_experts": 4,
                "intermediate_size": 24,
                "shared_intermediate_size": 40,
                "position_embedding_type": "rope",
            },
        ),
        "bamba": ("Bamba", {**_GQA, **_SPACE, "mamba_n_groups": 2, "attn_layer_indices": [1]}),
        "mamba2": (
            "Mamba2",
            {
                **_IDS,
                "vocab_size": VOCAB,
                "hidden_size": 48,
                "num_hidden_layers": 2,
                "num_heads": 6,
                "head_dim": 16,
                "state_size": 16,
                "n_groups": 2,
                "chunk_size": 8,
                "initializer_range": 0.02,
            },
        ),
        "nemotron-h": (
            "NemotronH",
            {**_GQA, **_NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention"]},
        ),
        "nemotron-h-moe": (
            "NemotronH",
            {
                **_GQA,
                **_NEMOTRON,
                **_GROUPS,
                "layers_block_type": ["moe", "linear_attention", "full_attention"],
                "moe_latent_size": 24,
                "moe_shared_expert_intermediate_size": 40,
                "mlp_bias": True,
            },
        ),
        "llama4": ("Llama4", {**_GQA, **_L4, "num_hidden_layers": 3, "moe_layers": [1, 2]}),
        "phimoe": (
            "Phimoe",
            {
                **_GQA,
                "num_local_experts": 4,
                "sliding_window": 5,
                "lm_head_bias": True,
                "attention_bias": True,
                "router_jitter_noise": 0.3,
            },
        ),
        "jamba": (
            "Jamba",
            {
                **_GQA,
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "num_experts": 4,
                "mamba_d_state": 8,
                "mamba_dt_rank": 6,
                "use_associative_scan": False,
            },
        ),
        "kimi-linear": (
            "KimiLinear",
            {
                **LATENT,
                **_DELTA_KINDS,
                "num_key_value_heads": 4,
                "q_lora_rank": None,
                "linear_num_heads": 4,
                "linear_head_dim": 8,
                "mlp_layer_types": ["dense", "sparse"],
            },
        ),
        "falcon-h1": ("FalconH1", {**_GQA, **_H1, **_H1_FACTORS}),
        "falcon-h1-norm": ("FalconH1", {**_GQA, **_H1, "mamba_rms_norm": True, "attention_bias": True}),
        "lfm2-moe": ("Lfm2Moe", {**_GQA, **_EXPERTS, "num_dense_layers": 1, "layer_types": ["full_attention", "conv"]}),
    }
) | {
    "gemma4-experts": _gemma4(
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=24,
    ),
    "gemma4-keys-are-values": _gemma4(
        num_kv_shared_layers=0, hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1
    ),
    "gemma3n": lambda: scaled(
        hf.Gemma3nForCausalLM(
            hf.Gemma3nTextConfig(
                **_GEMMA4, laurel_rank=4, altup_num_inputs=3, activation_sparsity_pattern=[0.6, 0.0, 0.6, 0.0]
            )
        )
    ),
}


def _with_slow_decay(build):
    """Kimi Linear whose decays are those of a trained one: transformers' chunks lose digits where they are large."""

    def built():
        model = build()
        for name, tensor in model.state_dict().items():
            if name.endswith("A_log"):
                tensor.mul_(0.2)
        return model

    return built


if "kimi-linear" in MORE_BUILDERS:
    MORE_BUILDERS["kimi-linear"] = _with_slow_decay(MORE_BUILDERS["kimi-linear"])

FEATURES = {
    "llama": "grouped heads",
    "llama-mha-tied": "tied LM head",
    "llama-biases-llama3-rope": "biases, llama3 rope",
    "llama-yarn-rope": "yarn rope",
    "llama-linear-rope": "linear rope",
    "mistral-window": "sliding window",
    "mixtral": "experts, sliding window",
    "qwen2-biases": "biases of q, k, v",
    "qwen2-mixed-windows": "layers with and without a window",
    "qwen2-moe": "experts, shared expert, dense layers in between",
    "qwen3-qk-norm": "norm of query and key heads",
    "qwen3-moe": "experts, norm of query and key heads",
    "gemma": "norm with weight 1 + gamma, scaled embedding",
    "gemma2": "soft-capping, sandwich norms, local and global layers",
    "gemma3": "norm of query and key heads, local and global layers with a rope each",
    "gemma4": "layers' own inputs, shared keys and values, heads and rope of each kind of layer, wide MLPs",
    "phi3": "fused projections, sliding window",
    "phi4-partial-rope": "fused projections, partial rope",
    "gpt2": "learned positions, scale by layer",
    "gpt-neo-local": "local and global layers, unscaled scores",
    "gptj": "interleaved partial rope, parallel block",
    "gpt-neox-parallel": "partial rope, parallel residual",
    "gpt-neox-sequential": "partial rope, use_parallel_residual=False",
    "opt": "learned positions from row 2, ReLU",
    "opt-post-norm-projection": "post-norm, projections around the layers (350m)",
    "bloom": "ALiBi, norm of the embedding",
    "falcon-multi-query": "one key/value head, parallel block (7b)",
    "falcon-alibi-sequential": "ALiBi, sequential block (rw)",
    "falcon-new-two-norms": "new decoder with two norms (40b)",
    "falcon-new-one-norm": "new decoder with one norm (11b)",
    "stablelm": "partial rope, layer norm, biases of q, k, v",
    "stablelm-parallel-head-norms": "parallel block, norms of single heads",
    "olmo2": "norms after attention and MLP, norm of all query heads together",
    "smollm3-some-rope": "layers without rope",
    "lfm2": "gated short convolutions in some layers, norm of query and key heads",
    "qwen3.5": "gated delta nets in some layers, gated attention, partial rope, norm with weight 1 + gamma",
    "qwen3-next": "gated delta nets with fused projections, gated attention, experts and dense layers",
    "qwen3.5-moe": "gated delta nets, gated attention, experts, shared expert",
    "olmo-hybrid": "gated delta nets with negative eigenvalues, norms in two places, no rope",
    "gpt-oss": "attention sinks, experts with clamped SwiGLU, local layers",
    "deepseek-v3": "latent attention, experts in groups chosen with a bias, shared experts, dense first layers",
    "deepseek-v3-halves": "latent attention without a narrow query, rope in halves",
    "deepseek-v2": "latent attention, softmax over experts in groups",
    "deepseek-v2-lite": "latent attention without a narrow query, softmax over experts",
    "glm4-moe-lite": "latent attention, experts in groups chosen with a bias (GLM-4.7-Flash)",
    "mistral4": "latent attention, queries that grow with the position",
    "seed-oss": "biases, wide heads",
    "cwm": "local and global layers, llama3 rope",
    "arcee": "squared ReLU without a gate, yarn rope",
    "ministral": "local and global layers",
    "olmo3": "norms after attention and MLP, local and global layers with a rope each",
    "glm": "interleaved partial rope, fused gate",
    "glm4": "sandwich norms, interleaved partial rope, fused gate",
    "ernie4_5": "interleaved rope, biases",
    "helium": "interleaved rope",
    "starcoder2": "layer norm, plain MLP, sliding window",
    "phi": "partial rope, parallel block, biases",
    "ministral3": "temperature of attention, yarn rope",
    "nanochat": "norms without weights, rope backwards, norm of the embedding",
    "granite": "factors of embedding, attention, residual and logits",
    "exaone4": "norms after attention and MLP, norm of heads, rope in local layers alone",
    "hunyuan": "norm of heads after rope, NTK rope",
    "cohere": "parallel block, interleaved rope, scaled logits",
    "cohere-head-norms": "norms of single heads",
    "cohere2": "parallel block, rope in local layers alone",
    "apertus": "xIELU, norm of query and key heads, llama3 rope",
    "glm4-moe": "experts by groups, shared expert, dense first layer, partial rope",
    "glm4-moe-head-norms": "the same, norm of heads, biases",
    "minimax-m2": "experts that sigmoids weigh, norm of all query heads together, partial rope",
    "olmoe": "experts, norm of all query heads together",
    "granite4": "state spaces, attention without rope, factors as in Granite",
    "granite4-moe": "state spaces, experts, one that sees every token with a fused gate",
    "bamba": "state spaces in two groups, partial rope",
    "mamba2": "state spaces alone, without attention or MLP",
    "nemotron-h": "layers of one part each: state spaces, attention without rope, MLPs",
    "nemotron-h-moe": "layers of one part each, experts on a narrower vector without a gate",
    "llama4": "attention in chunks, layers without rope, norms after rope, inputs of experts scaled, shared expert",
    "phimoe": "layer norms, experts of a sparse mixer, window, biases",
    "jamba": "selective scans, attention without rope, experts",
    "kimi-linear": "delta rule with a decay of each channel, latent attention without rope, experts, shared expert",
    "falcon-h1": "attention and a state space in each layer, factors of muP, outputs gated without a norm",
    "falcon-h1-norm": "attention and a state space in each layer, norm before the gate, biases",
    "lfm2-moe": "gated short convolutions, experts with a bias that only chooses",
    "gemma4-experts": "experts in addition to the MLP, a scale for each expert",
    "gemma4-keys-are-values": "global layers whose values are their keys, with fewer heads",
    "gemma3n": "several streams, low-rank path, sparse activations, layers' own inputs, shared keys and values",
}

FALLBACKS = _present(
    {
        "deepseek_v32": ("DeepseekV32", {**_LATENT_SIZES, **_INDEXER, "first_k_dense_replace": 1}),
        "glm_moe_dsa": ("GlmMoeDsa", {**_LATENT_SIZES, **_INDEXER}),
        "hy_v4": ("HYV4", {**_SIZES, **_INDEXER, "head_dim": 16, "qk_rope_head_dim": 8}),
        "deepseek_v4": ("DeepseekV4", {**_SIZES, **_INDEXER}),
    }
)
"""Families that generate by their own `generate()` for now."""

_NEMOTRON_LAYERS = {**_GQA, **_NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention"]}
_FROM_BELOW = {**_NEMOTRON_LAYERS, "time_step_min": 0.3, "time_step_max": 0.9}
_REASONS = {
    "nemotron-h": "decode steps do not clamp the time step from below, at time_step_min=0.3",
    "mamba2": "decode steps do not clamp the time step, at time_step_limit=(0.3, 0.6)",
    "nemotron-h, use_bias=True": "the projection's biases at padding enter the convolution",
    "lfm2, conv_bias=True": "the projection's biases at padding enter the convolution",
    "llama4": "the temperature of attention counts padding, at floor_scale=4",
}
_BUILDERS_OF_REASONS = _present(
    {
        "nemotron-h": ("NemotronH", _FROM_BELOW),
        "mamba2": ("Mamba2", {**_MAMBA2, "time_step_limit": (0.3, 0.6)}),
        "nemotron-h, use_bias=True": ("NemotronH", {**_NEMOTRON_LAYERS, "use_bias": True}),
        "lfm2, conv_bias=True": (
            "Lfm2",
            {**_GQA, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "conv_bias": True},
        ),
        "llama4": ("Llama4", {**_GQA, **_L4, "no_rope_layers": [0, 1], "floor_scale": 4, "attn_scale": 0.7}),
    }
)
DISAGREEING = {name: (_REASONS[name], build) for name, build in _BUILDERS_OF_REASONS.items()}
"""Models whose own `generate()` differs from their own forward over the row alone, why, and how they are built."""
