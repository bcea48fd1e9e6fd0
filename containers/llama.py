"""Llama 1, 2, 3: RMS norm, rotary, grouped heads, gated SiLU; optional biases."""

from hybrid_engine.containers.policy import Policy, register_policy

LLAMA = register_policy(
    Policy(
        layer_class="LlamaDecoderLayer",
        norm="rms",
        attention_norm="input_layernorm",
        scale="self_attn.scaling",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attention_output="self_attn.o_proj",
        mlp_norm="post_attention_layernorm",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
        rotary="rotary_emb",
    )
)
