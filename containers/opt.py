"""OPT, pre-norm variants: layer norm, learned positions that start at row 2, biases, ReLU."""

from hybrid_engine.containers.policy import Policy, register_policy

OPT = register_policy(
    Policy(
        layer_class="OPTDecoderLayer",
        norm="layer",
        attention_norm="self_attn_layer_norm",
        attention="self_attn",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attention_output="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up="fc1",
        down="fc2",
        activation="activation_function",
        final_norm="final_layer_norm",
        position_embedding="embed_positions",
        position_offset=2,
        required={"do_layer_norm_before": True, "_remove_final_layer_norm": False},
        absent=("project_in", "project_out"),
    )
)
