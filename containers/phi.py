"""Phi-1, 1.5, 2: layer norm, attention and MLP in parallel, partial rotary, biases everywhere.

Phi-3 and Phi-4: Llama's layer with one linear for query, key, value and one for gate and up; partial rotary.

Phi-3.5-MoE: layer norms, and experts chosen by a sparse mixer, which draws them at random in training. transformers
computes its longrope with the short factors at any length, times a factor of its own.
"""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import MoEPolicy, register_policy

# Norms of query and key heads, which no released model has, would need biases in the norm of heads.
PHI = register_policy(
    replace(
        LLAMA,
        layer_class="PhiDecoderLayer",
        norm="layer",
        block="parallel",
        mlp_norm=None,
        attention_output="self_attn.dense",
        gate=None,
        up="mlp.fc1",
        down="mlp.fc2",
        final_norm="final_layernorm",
        required={"qk_layernorm": False},
    )
)

PHI3 = register_policy(
    replace(
        LLAMA,
        layer_class="Phi3DecoderLayer",
        qkv=("self_attn.qkv_proj",),
        gate="mlp.gate_up_proj",
        up="mlp.gate_up_proj",
        window="sliding_window",
        layer_kinds=None,  # all layers are of one kind, whatever kinds the config lists
        recomputes_longrope=True,
    )
)

PHIMOE = register_policy(
    replace(
        LLAMA,
        layer_class="PhimoeDecoderLayer",
        norm="layer",
        window="sliding_window",
        layer_kinds=None,
        rope_factors=("short_mscale", "long_mscale"),
        moe=MoEPolicy(router="mlp.router", scoring="sparse_mixer", jitter="router_jitter_noise"),
    )
)
