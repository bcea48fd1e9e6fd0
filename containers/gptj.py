"""GPT-J: attention and MLP in parallel after one layer norm; rotary on adjacent pairs of some dimensions."""

from hybrid_engine.containers.policy import Policy, register_policy

GPTJ = register_policy(
    Policy(
        layer_class="GPTJBlock",
        norm="layer",
        block="parallel",
        attention_norm="ln_1",
        mlp_norm=None,
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        attention_output="attn.out_proj",
        rotary_dim="rotary_dim",
        is_interleaved=True,
        up="mlp.fc_in",
        down="mlp.fc_out",
        activation="activation_function",
        final_norm="ln_f",
    )
)
