"""Switches of the families' configs that the models of `model_families` leave as they are, one small model each.

SWITCHES run on containers. FALLING_BACK are models that containers do not compute, and of which they say so.
"""

from unittest import mock

import torch
import transformers as hf

from tests.support.model_families import LATENT, VOCAB, scaled

_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB, **_IDS}
_GQA = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 80}
_GPT = {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, **_IDS}
_NEO = {"hidden_size": 48, "num_layers": 4, "num_heads": 4, "vocab_size": VOCAB, **_IDS}
_BLOOM = {"hidden_size": 48, "n_layer": 2, "vocab_size": VOCAB, **_IDS}
_GEMMA = {**_GQA, "head_dim": 16, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_OSS = {**_GEMMA, "intermediate_size": 32, "num_local_experts": 4}
_WINDOW = {"use_sliding_window": True, "sliding_window": 4}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def _longrope(num_factors, **options):
    """Switches to the long factors after 11 tokens, in the middle of the responses."""
    return {
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 11,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0 + 0.1 * i for i in range(num_factors)],
            "long_factor": [1.0 + i for i in range(num_factors)],
            "original_max_position_embeddings": 11,
            **options,
        },
    }


def _model(name, config, sizes, **options):
    return lambda: getattr(hf, name)(getattr(hf, config)(**{**sizes, **options}))


def _llama(**options):
    return _model("LlamaForCausalLM", "LlamaConfig", _GQA, **options)


def _mistral(**options):
    return _model("MistralForCausalLM", "MistralConfig", _GQA, **options)


def _qwen2_moe(**options):
    sizes = {**_GQA, **_EXPERTS, "shared_expert_intermediate_size": 40}
    return _model("Qwen2MoeForCausalLM", "Qwen2MoeConfig", sizes, **options)


def _gemma2(**options):
    # Releases before 5.23 choose SDPA attention, which leaves soft-capping out.
    return _model("Gemma2ForCausalLM", "Gemma2Config", _GEMMA, attn_implementation="eager", **options)


def _gemma3(**options):
    return _model("Gemma3ForCausalLM", "Gemma3TextConfig", _GEMMA, **options)


def _phi3(**options):
    return _model("Phi3ForCausalLM", "Phi3Config", _GQA, **options)


def _gpt2(**options):
    return _model("GPT2LMHeadModel", "GPT2Config", _GPT, **options)


def _neox(**options):
    return _model("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_SIZES, "intermediate_size": 80}, **options)


def _opt(**options):
    return _model("OPTForCausalLM", "OPTConfig", {**_SIZES, "ffn_dim": 80}, **options)


def _bloom(**options):
    return _model("BloomForCausalLM", "BloomConfig", _BLOOM, **options)


def _falcon(**options):
    return _model("FalconForCausalLM", "FalconConfig", _SIZES, **options)


def _stablelm(**options):
    return _model("StableLmForCausalLM", "StableLmConfig", {**_GQA, "hidden_size": 64}, **options)


def _smollm3(**options):
    return _model("SmolLM3ForCausalLM", "SmolLM3Config", _GQA, **options)


def _multimodal_gemma3():
    config = hf.Gemma3Config(
        text_config=_GEMMA,
        vision_config=_VISION,
        mm_tokens_per_image=4,
        boi_token_index=95,
        eoi_token_index=96,
        image_token_index=97,
    )
    return hf.Gemma3ForConditionalGeneration(config)


def _multimodal_gemma4():
    config = hf.Gemma4Config(
        text_config={
            **_GEMMA,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
        },
        vision_config={**_VISION, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16},
        image_token_id=97,
        video_token_id=96,
        audio_token_id=95,
    )
    return scaled(hf.Gemma4ForConditionalGeneration(config))


def _multimodal_gemma3n():
    """Its vision tower, which rollouts of text do not read, is of a package that is not required."""
    config = hf.Gemma3nConfig(
        text_config={
            **_GEMMA,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 90,
            "num_kv_shared_layers": 0,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
        },
        vision_config={"hidden_size": 16, "vocab_size": 4, "vocab_offset": 90},
        audio_config={
            "hidden_size": 16,
            "vocab_size": 5,
            "vocab_offset": 94,
            "conf_num_hidden_layers": 1,
            "conf_num_attention_heads": 2,
        },
        image_token_id=91,
        audio_token_id=95,
    )
    build = hf.AutoModel.from_config

    def without_towers(config, **options):
        return build(config, **options) if isinstance(config, hf.Gemma3nTextConfig) else torch.nn.Identity()

    with mock.patch.object(hf.AutoModel, "from_config", without_towers):
        return scaled(hf.Gemma3nForConditionalGeneration(config))


def _kimi_k25():
    """The checkpoints name their text `kimi_k2`, which is a DeepSeek-V3."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.Kimi_K25Config(
        text_config={**LATENT, "kv_lora_rank": 12, "model_type": "kimi_k2", "first_k_dense_replace": 1},
        vision_config={**sizes, "pos_emb_height": 4, "pos_emb_width": 4},
        projection_hidden_size=16,
        image_token_id=95,
        video_token_id=96,
        vision_start_token_id=97,
        vision_end_token_id=98,
        tie_word_embeddings=False,
    )
    return hf.Kimi_K25ForConditionalGeneration(config)


SWITCHES = {
    "llama: wide heads": _llama(head_dim=16),
    "llama: gelu": _llama(hidden_act="gelu"),
    # One layer: squares of squares leave too few digits of fp32.
    "llama: squared relu": _llama(hidden_act="relu2", num_hidden_layers=1),
    "mistral: no window": _mistral(sliding_window=None),
    "mistral: wide heads": _mistral(sliding_window=5, head_dim=16),
    "qwen2-moe: windows": _qwen2_moe(**_WINDOW, norm_topk_prob=True),
    "qwen2-moe: no biases": _qwen2_moe(qkv_bias=False, decoder_sparse_step=2),
    "qwen3: biases and windows": _model(
        "Qwen3ForCausalLM", "Qwen3Config", _GQA, **_WINDOW, max_window_layers=1, head_dim=16, attention_bias=True
    ),
    "qwen3-moe: windows": _model(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_GQA, **_EXPERTS}, **_WINDOW, head_dim=16, mlp_only_layers=[0]
    ),
    "gemma: one key head": _model("GemmaForCausalLM", "GemmaConfig", _GQA, head_dim=16, num_key_value_heads=1),
    "gemma2: no soft-capping": _gemma2(attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma3: soft-capped logits, biases": _gemma3(
        attn_logit_softcapping=2.0, final_logit_softcapping=9.0, attention_bias=True
    ),
    "gemma3: scaled global rope": _gemma3(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    ),
    "gemma3: untied": _gemma3(tie_word_embeddings=False),
    "gemma3: with a vision tower": _multimodal_gemma3,
    "gemma4: with a vision tower": _multimodal_gemma4,
    "gemma3n: with a vision tower": _multimodal_gemma3n,
    "phi3: longrope": _phi3(**_longrope(6)),
    "phi4-mini: longrope on some dimensions": _phi3(hidden_size=64, **_longrope(6, partial_rotary_factor=0.75)),
    "gpt2: relu, narrow": _gpt2(activation_function="relu", n_inner=40),
    "gpt2: unscaled": _gpt2(scale_attn_weights=False),
    "gpt-neo: uneven layers": _model(
        "GPTNeoForCausalLM", "GPTNeoConfig", _NEO, window_size=3,
        attention_types=[[["global"], 1], [["local", "global"], 1], [["local"], 1]],
    ),
    "gptj: tied, all dimensions rotated": _model(
        "GPTJForCausalLM", "GPTJConfig", _GPT, rotary_dim=12, tie_word_embeddings=True
    ),
    "gpt-neox: no biases, all dimensions rotated": _neox(
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    ),
    "gpt-neox: tied, linear rope": _neox(
        hidden_size=64,
        hidden_act="gelu_fast",
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.25},
    ),
    "opt: no final norm": _opt(_remove_final_layer_norm=True),
    "opt: pre-norm with projections": _opt(word_embed_proj_dim=32),
    "opt: no biases": _opt(enable_bias=False),
    "opt: norms without weights": _opt(layer_norm_elementwise_affine=False),
    "bloom: one series of slopes": _bloom(n_head=4),
    "falcon: 7b with all heads": _falcon(multi_query=False),
    "falcon: 7b in sequence": _falcon(parallel_attn=False),
    "falcon: 7b with ALiBi": _falcon(alibi=True, bias=True),
    "falcon: 40b with ALiBi": _falcon(alibi=True, new_decoder_architecture=True, num_kv_heads=2),
    "falcon: 40b, untied, narrow": _falcon(
        new_decoder_architecture=True, num_kv_heads=1, tie_word_embeddings=False, ffn_hidden_size=80
    ),
    "stablelm: parallel": _stablelm(use_parallel_residual=True),
    "stablelm: norms of single heads": _stablelm(qk_layernorm=True, use_qkv_bias=True, partial_rotary_factor=0.5),
    "olmo2: biases, all heads": _model(
        "Olmo2ForCausalLM", "Olmo2Config", _GQA, num_key_value_heads=4, attention_bias=True
    ),
    "smollm3: windows and biases": _smollm3(**_WINDOW, no_rope_layers=[1, 0], attention_bias=True, mlp_bias=True),
    "gpt-oss: one expert, no biases": _model(
        "GptOssForCausalLM", "GptOssConfig", _OSS, num_experts_per_tok=1, attention_bias=False
    ),
}  # fmt: skip
if "NemotronHConfig" in dir(hf):
    # Biases that transformers' code adds at padding too, where the convolution reads them.
    SWITCHES["nemotron-h: biases, a time step from below"] = _model(
        "NemotronHForCausalLM", "NemotronHConfig", {**_GQA, "head_dim": 16},
        mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=2, chunk_size=8, use_bias=True,
        time_step_min=0.4, time_step_max=0.9, mlp_bias=True, layers_block_type=["linear_attention", "full_attention"],
    )  # fmt: skip
SWITCHES["llama4: temperature from the fourth token on, no norms"] = _model(
    "Llama4ForCausalLM", "Llama4TextConfig", _GQA, head_dim=12, intermediate_size_mlp=80, num_local_experts=4,
    attention_chunk_size=6, no_rope_layers=[1, 0], floor_scale=4, attn_scale=0.7, use_qk_norm=False, moe_layers=[0],
)  # fmt: skip
SWITCHES["phimoe: longrope"] = _model(
    "PhimoeForCausalLM", "PhimoeConfig", _GQA, num_local_experts=4,
    **_longrope(6, short_mscale=1.2, long_mscale=1.2),
)  # fmt: skip
if "Kimi_K25Config" in dir(hf):
    SWITCHES["kimi-k2.5: with a vision tower"] = _kimi_k25

FALLING_BACK = {
    "gemma3: bidirectional": _gemma3(use_bidirectional_attention=True),
    "bloom: residual behind the norm": _bloom(n_head=4, apply_residual_connection_post_layernorm=True),
}
