"""BLOOM: ALiBi instead of positions, a norm of the embedded tokens, one projection with q, k and v of each head."""

from hybrid_engine.containers.policy import Policy, register_policy

BLOOM = register_policy(
    Policy(
        layer_class="BloomBlock",
        norm="layer",
        attention_norm="input_layernorm",
        qkv=("self_attention.query_key_value",),
        qkv_layout="grouped",
        attention_output="self_attention.dense",
        alibi="alibi",
        mlp_norm="post_attention_layernorm",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        activation="gelu_new",
        embedding_norm="word_embeddings_layernorm",
        final_norm="ln_f",
        required={"apply_residual_connection_post_layernorm": False},
    )
)
