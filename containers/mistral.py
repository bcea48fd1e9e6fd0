"""Mistral: Llama's layer with a sliding window. Mixtral: with a mixture of experts."""

from dataclasses import replace

from hybrid_engine.containers import moe_policy
from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

MISTRAL = register_policy(replace(LLAMA, layer_class="MistralDecoderLayer", window="sliding_window"))

# Its layers are all of one kind, whatever the config calls them.
MIXTRAL = register_policy(replace(MISTRAL, layer_class="MixtralDecoderLayer", moe=moe_policy.MIXTRAL, layer_kinds=None))
