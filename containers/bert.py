"""BERT, RoBERTa and DistilBERT: encoders with a norm after each sum, biases everywhere and learned positions."""

from dataclasses import replace

from hybrid_engine.containers.policy import Policy, register_policy

BERT = register_policy(
    Policy(
        layer_class="BertLayer",
        is_encoder=True,
        norm="layer",
        block="post_norm",
        attention_norm="attention.output.LayerNorm",
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        num_kv_heads="num_attention_heads",
        attention_output="attention.output.dense",
        mlp_norm="output.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
        required={"is_decoder": False, "add_cross_attention": False},
    )
)
ROBERTA = register_policy(replace(BERT, layer_class="RobertaLayer"))
DISTILBERT = register_policy(
    replace(
        BERT,
        layer_class="TransformerBlock",
        attention_norm="sa_layer_norm",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        attention_output="attention.out_lin",
        mlp_norm="output_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        activation="activation",
    )
)
