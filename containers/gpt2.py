"""GPT-2: layer norm, learned positions, one fused query-key-value projection, weights stored [in, out]."""

from hybrid_engine.containers.policy import Policy, register_policy

GPT2 = register_policy(
    Policy(
        layer_class="GPT2Block",
        norm="layer",
        attention_norm="ln_1",
        scale="attn.scaling",
        qkv=("attn.c_attn",),
        attention_output="attn.c_proj",
        mlp_norm="ln_2",
        up="mlp.c_fc",
        down="mlp.c_proj",
        activation="activation_function",
        final_norm="ln_f",
        position_embedding="wpe",
        required={"add_cross_attention": False},
    )
)
