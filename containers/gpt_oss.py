"""gpt-oss: attention sinks, local layers among the global ones, a mixture of experts with clamped SwiGLU."""

from dataclasses import replace

from hybrid_engine.containers import moe_policy
from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

GPT_OSS = register_policy(
    replace(
        LLAMA,
        layer_class="GptOssDecoderLayer",
        norm="rms_fp32",
        window="sliding_window",
        sinks="self_attn.sinks",
        moe=moe_policy.GPT_OSS,
    )
)
