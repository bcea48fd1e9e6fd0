"""MiniMax-M2: Llama's layer with norms over all query and all key heads, and experts that sigmoids weigh."""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import MoEPolicy, register_policy

MINIMAX_M2 = register_policy(
    replace(
        LLAMA,
        layer_class="MiniMaxM2DecoderLayer",
        q_norm="self_attn.q_norm",
        k_norm="self_attn.k_norm",
        qk_norm_width="whole",
        moe=MoEPolicy(scoring="sigmoid_then_topk", choice_bias="mlp.e_score_correction_bias", fp32_weights=True),
    )
)
