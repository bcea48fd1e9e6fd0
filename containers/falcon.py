"""Falcon: one or a few key/value heads, ALiBi or rotary, attention and MLP in parallel or one after the other."""

from dataclasses import replace

from hybrid_engine.containers.policy import Policy, register_policy

FALCON = register_policy(
    Policy(
        layer_class="FalconDecoderLayer",
        norm="layer",
        block="parallel",
        attention_norm="input_layernorm",
        qkv=("self_attention.query_key_value",),
        qkv_layout="grouped",
        num_kv_heads=1,
        attention_output="self_attention.dense",
        alibi="alibi",
        is_alibi_rounded=True,
        rotary="rotary_emb",
        mlp_norm=None,
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        activation="activation",
        final_norm="ln_f",
        required={"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True},
    )
)
FALCON_MULTI_HEAD = register_policy(
    replace(FALCON, num_kv_heads="num_attention_heads", required={**FALCON.required, "multi_query": False})
)
FALCON_SEQUENTIAL, FALCON_MULTI_HEAD_SEQUENTIAL = (
    register_policy(
        replace(
            policy,
            block="pre_norm",
            mlp_norm="post_attention_layernorm",
            required={**policy.required, "parallel_attn": False},
        )
    )
    for policy in (FALCON, FALCON_MULTI_HEAD)
)
FALCON_NEW = register_policy(
    replace(
        FALCON,
        num_kv_heads="num_kv_heads",
        required={"new_decoder_architecture": True, "parallel_attn": True, "num_ln_in_parallel_attn": 1},
    )
)
FALCON_NEW_TWO_NORMS = register_policy(
    replace(
        FALCON_NEW,
        attention_norm="ln_attn",
        mlp_norm="ln_mlp",
        required={**FALCON_NEW.required, "num_ln_in_parallel_attn": 2},
    )
)
