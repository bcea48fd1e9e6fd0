"""Jamba: selective scans of Mamba-1 in most layers, attention without rope in the others; experts in some layers."""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import MoEPolicy, register_policy
from hybrid_engine.containers.selective_scan import SelectiveScanPolicy

JAMBA = register_policy(
    replace(
        LLAMA,
        layer_class=("JambaAttentionDecoderLayer", "JambaMambaDecoderLayer"),
        mixers={"linear_attention": SelectiveScanPolicy()},
        mlp_norm="pre_ff_layernorm",
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
        rotary=None,
        final_norm="final_layernorm",
        moe=MoEPolicy(router="feed_forward.router", normalizes=False, experts="feed_forward.experts"),
    )
)
