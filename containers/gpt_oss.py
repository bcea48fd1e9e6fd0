"""gpt-oss: attention sinks, local layers among the global ones, a mixture of experts with clamped SwiGLU."""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import MoEPolicy, register_policy

GPT_OSS = register_policy(
    replace(
        LLAMA,
        layer_class="GptOssDecoderLayer",
        norm="rms_fp32",
        window="sliding_window",
        sinks="self_attn.sinks",
        moe=MoEPolicy(
            router="mlp.router",
            scoring="topk_then_softmax",
            up_bias="gate_up_proj_bias",
            down_bias="down_proj_bias",
            is_stored_transposed=True,
            layout="interleaved",
            activation=None,
        ),
    )
)
