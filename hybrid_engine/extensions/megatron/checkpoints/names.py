"""Names of a GPT's weights in the checkpoints of all releases of Megatron, as those of Megatron-LM's third release.

Megatron Core's are another set: `decoder.layers.0.self_attention.linear_qkv.weight` is here
`language_model.encoder.layers.0.self_attention.query_key_value.weight`. Facts from Megatron-LM's
tools/checkpoint/schema_core.py and megatron/core/transformer/mlp.py.
"""

import re

LAYERS = "language_model.encoder.layers."
CORE = (
    (r"^(embedding|output_layer)\.", r"language_model.\1."),
    (r"^decoder\.", "language_model.encoder."),
    (r"\.linear_qkv\.layer_norm_", ".linear_qkv_norm_"),  # norms that Transformer Engine fuses with what follows
    (r"self_attention\.linear_qkv_norm_", "input_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_", "post_attention_layernorm."),
    (r"\.pre_mlp_layernorm\.", ".post_attention_layernorm."),
    (r"\.linear_qkv\.", ".query_key_value."),
    (r"\.linear_proj\.", ".dense."),
    (r"\.linear_fc1\.", ".dense_h_to_4h."),
    (r"\.linear_fc2\.", ".dense_4h_to_h."),
)
OLDER = (
    (r"^language_model\.transformer\.", "language_model.encoder."),
    (r"\.attention\.", ".self_attention."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_attention_norm\.", ".post_attention_layernorm."),
    (r"\.final_norm\.", ".final_layernorm."),
)


def common_name(name: str) -> str:
    """The name in the third release of a weight that a checkpoint calls `name`."""
    name = name.removeprefix("module.")
    for pattern, replacement in (*CORE, *OLDER):
        name = re.sub(pattern, replacement, name)
    return name


def layer_of(name: str) -> int | None:
    """The layer that a weight is of, by its name in the third release."""
    return int(name.removeprefix(LAYERS).split(".")[0]) if name.startswith(LAYERS) else None


def with_layer(name: str, layer: int) -> str:
    """The name of the same weight in another layer."""
    return f"{LAYERS}{layer}.{name.removeprefix(LAYERS).split('.', 1)[1]}"
