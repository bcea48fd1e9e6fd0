"""Granite 3: Llama's layer with factors of the embedding, the attention, what each block adds, and the logits."""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

GRANITE = register_policy(
    replace(
        LLAMA,
        layer_class="GraniteDecoderLayer",
        embedding_scale="embedding_multiplier",
        residual_scale="residual_multiplier",
        logit_divisor="logits_scaling",
    )
)
