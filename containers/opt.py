"""OPT: layer norm before or (350m) after the sum, learned positions that start at row 2, biases.

A projection surrounds the layers if the embedding is narrower than they are (350m).
"""

from dataclasses import replace

from hybrid_engine.containers.policy import Policy, register_policy

OPT = register_policy(
    Policy(
        layer_class="OPTDecoderLayer",
        norm="layer",
        attention_norm="self_attn_layer_norm",
        scale="self_attn.scaling",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attention_output="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up="fc1",
        down="fc2",
        activation="activation_function",
        position_embedding="embed_positions",
        position_offset=2,
        project_in="project_in",
        project_out="project_out",
        final_norm="final_layer_norm",
        required={"do_layer_norm_before": True, "_remove_final_layer_norm": False},
    )
)
OPT_WITHOUT_FINAL_NORM = register_policy(
    replace(OPT, final_norm=None, required={"do_layer_norm_before": True, "_remove_final_layer_norm": True})
)
OPT_POST_NORM = register_policy(
    replace(OPT, block="post_norm", final_norm=None, required={"do_layer_norm_before": False})
)
