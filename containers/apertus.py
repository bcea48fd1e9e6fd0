"""Apertus: norms under other names, norms of query and key heads, an MLP without gate whose activation is xIELU."""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

APERTUS = register_policy(
    replace(
        LLAMA,
        layer_class="ApertusDecoderLayer",
        attention_norm="attention_layernorm",
        mlp_norm="feedforward_layernorm",
        q_norm="self_attn.q_norm",
        k_norm="self_attn.k_norm",
        gate=None,
        xielu="mlp.act_fn",
    )
)
