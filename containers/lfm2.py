"""LFM2: gated short convolutions in most layers, attention with RMS norm on the heads of q and k in the others.

LFM2-MoE has experts in all layers but the first ones: routing by sigmoids and a bias that only chooses.

With `conv_bias=True`, which no published model has, transformers' own code reads the biases at padding: a sequence that
is padded on the left gets other logits there than alone. Here they are those of the sequence alone.
"""

from dataclasses import replace

from hybrid_engine.containers.policy import MoEPolicy, Policy, register_policy
from hybrid_engine.containers.short_conv import ShortConvPolicy

LFM2 = register_policy(
    Policy(
        layer_class="Lfm2DecoderLayer",
        norm="rms",
        attention_norm="operator_norm",
        mlp_norm="ffn_norm",
        final_norm="embedding_norm",
        mixers={"conv": ShortConvPolicy()},
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attention_output="self_attn.out_proj",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        rotary="rotary_emb",
        gate="feed_forward.w1",
        up="feed_forward.w3",
        down="feed_forward.w2",
        activation="silu",
    )
)

_EXPERTS = MoEPolicy(
    router="feed_forward.gate",
    scoring="sigmoid_then_topk",
    factor="routed_scaling_factor",
    normalizes="norm_topk_prob",
    experts="feed_forward.experts",
    activation="silu",
)

LFM2_MOE = register_policy(
    replace(
        LFM2,
        layer_class="Lfm2MoeDecoderLayer",
        rotary="pos_emb",
        moe=replace(_EXPERTS, choice_bias="feed_forward.expert_bias"),
        required={"use_expert_bias": True},
    )
)

LFM2_MOE_WITHOUT_BIAS = register_policy(replace(LFM2_MOE, moe=_EXPERTS, required={"use_expert_bias": False}))
