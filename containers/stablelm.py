"""StableLM: layer norm, partial rotary, gated MLP; optionally in parallel with attention, and with norms per head."""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

STABLELM = register_policy(
    replace(
        LLAMA,
        layer_class="StableLmDecoderLayer",
        norm="layer",
        required={"use_parallel_residual": False, "qk_layernorm": False},
    )
)
STABLELM_PARALLEL = register_policy(
    replace(
        STABLELM,
        block="parallel",
        mlp_norm=None,
        required={"use_parallel_residual": True, "qk_layernorm": False},
    )
)
STABLELM_HEAD_NORMS, STABLELM_PARALLEL_HEAD_NORMS = (
    register_policy(
        replace(
            policy,
            q_norm="self_attn.q_layernorm",
            k_norm="self_attn.k_layernorm",
            qk_norm_width="each_head",
            required={**policy.required, "qk_layernorm": True},
        )
    )
    for policy in (STABLELM, STABLELM_PARALLEL)
)
