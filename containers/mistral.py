"""Mistral: Llama's layer with a sliding window. Mixtral: with a mixture of experts. Ministral: in some layers."""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import MoEPolicy, register_policy

# All layers of both are of one kind, whatever the config lists: Ministral's files list kinds, and load here.
MISTRAL = register_policy(replace(LLAMA, layer_class="MistralDecoderLayer", window="sliding_window", layer_kinds=None))

MIXTRAL = register_policy(replace(MISTRAL, layer_class="MixtralDecoderLayer", moe=MoEPolicy(fp32_weights=True)))

MINISTRAL = register_policy(replace(MISTRAL, layer_class="MinistralDecoderLayer", layer_kinds="layer_types"))
