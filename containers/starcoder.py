"""StarCoder2: layer norm with biases, rotary, grouped heads, a sliding window, a plain MLP."""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

STARCODER2 = register_policy(
    replace(
        LLAMA,
        layer_class="Starcoder2DecoderLayer",
        norm="layer",
        gate=None,
        up="mlp.c_fc",
        down="mlp.c_proj",
        window="sliding_window",
        layer_kinds=None,  # all layers are of one kind, whatever kinds the config lists
    )
)
