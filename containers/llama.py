"""Llama 1, 2, 3: RMS norm, rotary, grouped heads, gated SiLU; optional biases. Families with its layer follow it.

Seed-OSS is the same layer. CWM has sliding windows in most layers. Arcee (AFM) squares a ReLU instead of a gate.
"""

from dataclasses import replace

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

SEED_OSS = register_policy(replace(LLAMA, layer_class="SeedOssDecoderLayer"))

CWM = register_policy(replace(LLAMA, layer_class="CwmDecoderLayer", window="sliding_window"))

ARCEE = register_policy(replace(LLAMA, layer_class="ArceeDecoderLayer", gate=None))
