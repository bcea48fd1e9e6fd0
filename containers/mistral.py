"""Mistral: Llama's layer with a sliding window, which is read off the config."""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

MISTRAL = register_policy(replace(LLAMA, layer_class="MistralDecoderLayer", has_window=True))
