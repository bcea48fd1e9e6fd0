"""Qwen2: Llama's layer with q, k, v biases. Qwen3: without them, with RMS norm on the heads of q and k."""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

QWEN2 = register_policy(replace(LLAMA, layer_class="Qwen2DecoderLayer", has_window=True))

QWEN3 = register_policy(
    replace(QWEN2, layer_class="Qwen3DecoderLayer", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
)
