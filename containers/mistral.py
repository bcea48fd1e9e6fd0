"""Mistral: Llama's layer with a sliding window. Mixtral: with a mixture of experts. Ministral: in some layers.

Ministral-3: with attention whose temperature falls beyond the length that it was first trained on.
"""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import MoEPolicy, TemperaturePolicy, register_policy

# All layers of both are of one kind, whatever the config lists: Ministral's files list kinds, and load here.
MISTRAL = register_policy(replace(LLAMA, layer_class="MistralDecoderLayer", window="sliding_window", layer_kinds=None))

MIXTRAL = register_policy(replace(MISTRAL, layer_class="MixtralDecoderLayer", moe=MoEPolicy(fp32_weights=True)))

MINISTRAL = register_policy(replace(MISTRAL, layer_class="MinistralDecoderLayer", layer_kinds="layer_types"))

MINISTRAL3 = register_policy(
    replace(
        MISTRAL,
        layer_class="Ministral3DecoderLayer",
        temperature=TemperaturePolicy(
            strength="rope_parameters.llama_4_scaling_beta",
            length="rope_parameters.original_max_position_embeddings",
            has_rope=True,
        ),
    )
)
