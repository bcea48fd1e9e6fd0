"""Command R and R+: layer norm without bias, attention and MLP in parallel, rotary on adjacent pairs, scaled logits.

R+ has norms of single heads. Command A and R7B (`Cohere2`) have windows, and rotary in the layers with a window alone.
"""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

COHERE = register_policy(
    replace(
        LLAMA,
        layer_class="CohereDecoderLayer",
        norm="layer",
        block="parallel",
        mlp_norm=None,
        is_interleaved=True,
        logit_scale="logit_scale",
        required={"use_qk_norm": False},
    )
)

COHERE_HEAD_NORMS = register_policy(
    replace(
        COHERE,
        q_norm="self_attn.q_norm",
        k_norm="self_attn.k_norm",
        qk_norm_width="each_head",
        required={"use_qk_norm": True},
    )
)

COHERE2 = register_policy(
    replace(COHERE, layer_class="Cohere2DecoderLayer", window="sliding_window", is_rope_local=True, required={})
)
