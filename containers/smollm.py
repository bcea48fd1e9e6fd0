"""SmolLM3: Llama's layer, some without rotary embedding."""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

SMOLLM3 = register_policy(
    replace(LLAMA, layer_class="SmolLM3DecoderLayer", window="sliding_window", rope_layers="no_rope_layers")
)
