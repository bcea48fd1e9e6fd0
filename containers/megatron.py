"""Megatron-LM's GPT layer, with DeepSpeed's mixture of experts in the layers that have one.

Layers are identified by their submodule names, whatever their class. Query, key and value of a head are adjacent
(`[H, 3, D]`, checkpoint version 2 and later). https://github.com/NVIDIA/Megatron-LM, megatron/model/transformer.py.
"""

from dataclasses import replace

from hybrid_engine.containers.policy import MoEPolicy, Policy, register_policy

MEGATRON = register_policy(
    Policy(
        layer_class=None,
        norm="layer",
        attention_norm="input_layernorm",
        qkv=("self_attention.query_key_value",),
        qkv_layout="grouped",
        num_kv_heads="num_attention_heads",
        attention_output="self_attention.dense",
        mlp_norm="post_attention_layernorm",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        moe=MoEPolicy(
            router="mlp.deepspeed_moe.gate.wg",
            normalizes="norm_topk_prob",
            experts="mlp.deepspeed_moe.experts.deepspeed_experts",
            is_list=True,
            up="dense_h_to_4h",
            down="dense_4h_to_h",
            layout="plain",
            residual=("mlp.mlp.dense_h_to_4h", "mlp.mlp.dense_4h_to_h", "mlp.coefficient"),
        ),
        position_embedding="language_model.embedding.position_embeddings",
        final_norm="final_layernorm",
    )
)
MEGATRON_WITH_OLD_NAMES = register_policy(
    replace(MEGATRON, qkv=("attention.query_key_value",), attention_output="attention.dense")
)
