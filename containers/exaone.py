"""EXAONE 4: norms after attention and MLP, norms of query and key heads, rotary in the layers with a window alone."""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

EXAONE4 = register_policy(
    replace(
        LLAMA,
        layer_class="Exaone4DecoderLayer",
        attention_norm=None,
        attention_post_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp_post_norm="post_feedforward_layernorm",
        q_norm="self_attn.q_norm",
        k_norm="self_attn.k_norm",
        window="sliding_window",
        is_rope_local=True,
    )
)
