"""Qwen2: Llama's layer with q, k, v biases. Qwen3: without biases, with RMS norm on the heads of q and k.

Both also exist with a mixture of experts; Qwen2's has one expert that sees every token. The text part of the vision
models is the same layer; for text its rotary embedding of three axes is the ordinary one.
"""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import MoEPolicy, register_policy

QWEN2 = register_policy(
    replace(
        LLAMA,
        layer_class=("Qwen2DecoderLayer", "Qwen2VLDecoderLayer", "Qwen2_5_VLDecoderLayer"),
        window="sliding_window",
    )
)

QWEN2_MOE = register_policy(
    replace(
        QWEN2,
        layer_class="Qwen2MoeDecoderLayer",
        moe=MoEPolicy(
            normalizes="norm_topk_prob",
            shared=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
            shared_gate="mlp.shared_expert_gate",
        ),
    )
)

QWEN3 = register_policy(
    replace(QWEN2, layer_class="Qwen3DecoderLayer", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
)

# All its layers are of one kind, whatever kinds the config lists.
QWEN3_MOE = register_policy(
    replace(QWEN3, layer_class="Qwen3MoeDecoderLayer", moe=MoEPolicy(normalizes="norm_topk_prob"), layer_kinds=None)
)

QWEN3_VL = register_policy(replace(QWEN3, layer_class="Qwen3VLTextDecoderLayer", window=None))
QWEN3_VL_MOE = register_policy(replace(QWEN3_MOE, layer_class="Qwen3VLMoeTextDecoderLayer", window=None))
