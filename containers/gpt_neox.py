"""GPT-NeoX and Pythia: attention and MLP in parallel, each after its layer norm, or one after the other.

One projection holds query, key and value of each head together; partial rotary.
"""

from dataclasses import replace

from hybrid_engine.containers.policy import Policy, register_policy

GPT_NEOX = register_policy(
    Policy(
        layer_class="GPTNeoXLayer",
        norm="layer",
        block="parallel",
        attention_norm="input_layernorm",
        qkv=("attention.query_key_value",),
        qkv_layout="grouped",
        attention_output="attention.dense",
        scale="attention.scaling",
        rotary="rotary_emb",
        mlp_norm="post_attention_layernorm",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        final_norm="final_layer_norm",
        required={"use_parallel_residual": True},
    )
)
GPT_NEOX_SEQUENTIAL = register_policy(replace(GPT_NEOX, block="pre_norm", required={"use_parallel_residual": False}))
