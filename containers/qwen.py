"""Qwen2: Llama's layer with q, k, v biases. Qwen3: without biases, with RMS norm on the heads of q and k.

Both also exist with a mixture of experts; Qwen2's has one expert that sees every token.
"""

from dataclasses import replace

from hybrid_engine.containers import moe_policy
from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

QWEN2 = register_policy(replace(LLAMA, layer_class="Qwen2DecoderLayer", window="sliding_window"))

QWEN2_MOE = register_policy(replace(QWEN2, layer_class="Qwen2MoeDecoderLayer", moe=moe_policy.QWEN2_MOE))

QWEN3 = register_policy(
    replace(QWEN2, layer_class="Qwen3DecoderLayer", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
)

# All its layers are of one kind, whatever kinds the config lists.
QWEN3_MOE = register_policy(
    replace(QWEN3, layer_class="Qwen3MoeDecoderLayer", moe=moe_policy.QWEN3_MOE, layer_kinds=None)
)
