"""Qwen3-Next and Qwen3.5: three layers with a gated delta net for each one with gated attention.

Norms have the weight 1 + gamma, rotary is partial, and each head's context is multiplied by the sigmoid of a gate from
the query projection. Qwen3-Next and Qwen3.5-MoE have experts with one that sees every token. The text part of the
vision models is the same layer; for text its rotary embedding of three axes is the ordinary one.
"""

from dataclasses import replace

from hybrid_engine.containers.gated_delta import GatedDeltaPolicy
from hybrid_engine.containers.policy import register_policy
from hybrid_engine.containers.qwen import QWEN2_MOE, QWEN3

QWEN3_NEXT = register_policy(
    replace(
        QWEN3,
        layer_class="Qwen3NextDecoderLayer",
        norm="rms_offset",
        window=None,
        gates_context=True,
        mixers={"linear_attention": GatedDeltaPolicy(inputs=("in_proj_qkvz", "in_proj_ba"), layout="grouped")},
        moe=QWEN2_MOE.moe,
    )
)

QWEN3_5 = register_policy(
    replace(
        QWEN3_NEXT,
        layer_class="Qwen3_5DecoderLayer",
        mixers={"linear_attention": GatedDeltaPolicy(inputs=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))},
        moe=None,
    )
)

assert QWEN2_MOE.moe is not None
QWEN3_5_MOE = register_policy(
    replace(QWEN3_5, layer_class="Qwen3_5MoeDecoderLayer", moe=replace(QWEN2_MOE.moe, normalizes=True))
)
