"""Gemma 1, 2, 3: RMS norm with weight 1 + gamma; from 2 on norms around each block, soft-capping, local layers."""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

GEMMA = register_policy(replace(LLAMA, layer_class="GemmaDecoderLayer", norm="rms_offset"))
GEMMA2 = register_policy(
    replace(
        GEMMA,
        layer_class="Gemma2DecoderLayer",
        activation="hidden_activation",
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
        softcap="attn_logit_softcapping",
        window="sliding_window",
        logit_softcap="final_logit_softcapping",
    )
)
# Its attention has no soft-capping in transformers, whatever the config says.
GEMMA3 = register_policy(
    replace(
        GEMMA2,
        layer_class="Gemma3DecoderLayer",
        q_norm="self_attn.q_norm",
        k_norm="self_attn.k_norm",
        softcap=None,
    )
)
