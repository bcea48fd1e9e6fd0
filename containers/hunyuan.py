"""Hunyuan (dense): Llama's layer with norms of query and key heads after rotary embedding."""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

HUNYUAN = register_policy(
    replace(
        LLAMA,
        layer_class="HunYuanDenseV1DecoderLayer",
        q_norm="self_attn.query_layernorm",
        k_norm="self_attn.key_layernorm",
        is_qk_norm_last=True,
    )
)
