"""ERNIE 4.5: Llama's layer with rotary on adjacent pairs; optional biases."""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

ERNIE_4_5 = register_policy(replace(LLAMA, layer_class="Ernie4_5DecoderLayer", is_interleaved=True))
