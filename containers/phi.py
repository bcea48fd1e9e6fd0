"""Phi-3 and Phi-4: Llama's layer with one linear for query, key, value and one for gate and up; partial rotary."""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

PHI3 = register_policy(
    replace(
        LLAMA,
        layer_class="Phi3DecoderLayer",
        qkv=("self_attn.qkv_proj",),
        gate="mlp.gate_up_proj",
        up="mlp.gate_up_proj",
        window="sliding_window",
        layer_kinds=None,  # all layers are of one kind, whatever kinds the config lists
        recomputes_longrope=True,
    )
)
