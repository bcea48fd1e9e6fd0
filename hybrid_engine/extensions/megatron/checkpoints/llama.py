"""Megatron's GPT in Llama's form (rotary positions, RMS norms, gated MLP) as a transformers model.

The model is a Llama, a Qwen2 if only the query, key and value projections have biases, or a Qwen3 if queries and keys
are normalized. K key/value heads; each has its Q / K queries, key and value together in the fused projection; D head
dimension. `loading.py` calls this.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from hybrid_engine.extensions.megatron.checkpoints.rank_files import LAYERS, layer_of
from hybrid_engine.inference.checkpoint import Rows, Source

NEEDED = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "apply_layernorm_1p": False,
    "multi_latent_attention": False,
    "num_experts": None,
    "rotary_seq_len_interpolation_factor": None,
}
"""Values that the options must have if they are present; other values describe none of these families."""


def is_llama_like(arguments: Mapping[str, Any]) -> bool:
    """Whether the options describe a model in Llama's form."""
    return bool(arguments.get("swiglu")) or arguments.get("normalization") == "RMSNorm"


def read_llama_config(
    arguments: Mapping[str, Any], sources: Mapping[str, Source], num_layers: int, folder: Path
) -> PreTrainedConfig:
    """The model's config: sizes from the shapes, the rest from the options. ValueError for an unsupported form."""
    for name, wanted in NEEDED.items():
        value = arguments.get(name, wanted)
        if value != wanted and not (wanted in (False, None) and not value):
            raise ValueError(
                f"checkpoint={folder}: its args have {name}={value!r}, and of models with gated MLPs or RMS norms only "
                f"those with {name}={wanted!r} are read; convert it to safetensors with Megatron's tools"
            )
    vocab_size, hidden_size = sources["language_model.embedding.word_embeddings.weight"].shape
    num_heads = arguments["num_attention_heads"]
    num_kv_heads = arguments["num_query_groups"] if arguments.get("group_query_attention") else num_heads
    rope = {"rope_type": "default", "rope_theta": float(arguments.get("rotary_base") or 10000)}
    if arguments.get("use_rope_scaling"):  # Llama 3.1
        factor = float(arguments.get("rope_scaling_factor") or 8.0)
        rope |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 8192
    kind: type[PreTrainedConfig] = LlamaConfig
    has_bias = f"{LAYERS}0.self_attention.dense.bias" in sources
    options: dict[str, Any] = {"attention_bias": has_bias, "mlp_bias": has_bias}
    if f"{LAYERS}0.self_attention.q_layernorm.weight" in sources:
        kind, options = Qwen3Config, {"attention_bias": has_bias}
    elif not has_bias and f"{LAYERS}0.self_attention.query_key_value.bias" in sources:
        kind, options = Qwen2Config, {}
    return kind(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=arguments.get("kv_channels") or hidden_size // num_heads,
        intermediate_size=sources[f"{LAYERS}0.mlp.dense_4h_to_h.weight"].shape[1],
        max_position_embeddings=arguments["max_position_embeddings"],
        rms_norm_eps=arguments.get("norm_epsilon") or arguments.get("layernorm_epsilon") or 1e-5,
        rope_parameters=rope,
        tie_word_embeddings="language_model.output_layer.weight" not in sources,
        **options,
    )


def llama_sources(sources: Mapping[str, Source], config: Any) -> dict[str, Source]:
    """The weights under transformers' names; fused projections are split."""
    result: dict[str, Source] = {}
    for name, source in sources.items():
        layer = layer_of(name)
        if layer is None:
            result[OUTSIDE[name]] = source
            continue
        path, _, kind = name.removeprefix(f"{LAYERS}{layer}.").rpartition(".")
        prefix = f"model.layers.{layer}."
        if path == "self_attention.query_key_value":
            parts = zip("qkv", _head_rows(config), strict=True)
            result |= {f"{prefix}self_attn.{part}_proj.{kind}": Rows(source, rows) for part, rows in parts}
        elif path == "mlp.dense_h_to_4h":
            size = config.intermediate_size
            result[f"{prefix}mlp.gate_proj.{kind}"] = Rows(source, ((0, size),))
            result[f"{prefix}mlp.up_proj.{kind}"] = Rows(source, ((size, 2 * size),))
        else:
            result[f"{prefix}{WHOLE.get(path, path)}.{kind}"] = source
    return result


OUTSIDE = {
    "language_model.embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "language_model.encoder.final_layernorm.weight": "model.norm.weight",
    "language_model.output_layer.weight": "lm_head.weight",
}
WHOLE = {
    "self_attention.dense": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}


def _head_rows(config: Any) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Rows of the queries, keys and values of all heads in the fused projection `[K * (Q / K + 2) * D, E]`."""
    dim, num_queries = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    starts = [group * (num_queries + 2) * dim for group in range(config.num_key_value_heads)]
    bounds = ((0, num_queries), (num_queries, num_queries + 1), (num_queries + 1, num_queries + 2))
    return tuple(tuple((at + first * dim, at + last * dim) for at in starts) for first, last in bounds)
