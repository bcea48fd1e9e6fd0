"""Helium: Llama's layer with rotary on adjacent pairs, and norms that round once."""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

HELIUM = register_policy(replace(LLAMA, layer_class="HeliumDecoderLayer", norm="rms_fp32", is_interleaved=True))
