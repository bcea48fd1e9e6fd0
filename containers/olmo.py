"""OLMo-2: RMS norms after attention and MLP, not before, and norms over all query heads and over all key heads.

OLMo-3 is the same layer with sliding windows in most layers, which have a rope of their own. OLMo-Hybrid has gated
delta nets in most layers, with norms before them and before the MLP, and it may have no rope.
OLMoE is Llama's layer with these norms of queries and keys and a mixture of experts.
"""

from dataclasses import replace

from hybrid_engine.containers.gated_delta import GatedDeltaPolicy
from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import MoEPolicy, register_policy

OLMO2 = register_policy(
    replace(
        LLAMA,
        layer_class="Olmo2DecoderLayer",
        norm="rms_fp32",
        attention_norm=None,
        attention_post_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp_post_norm="post_feedforward_layernorm",
        q_norm="self_attn.q_norm",
        k_norm="self_attn.k_norm",
        qk_norm_width="whole",
    )
)

OLMO3 = register_policy(replace(OLMO2, layer_class="Olmo3DecoderLayer", window="sliding_window"))

# A clamp of queries, keys and values, which the released model does not have, is not among the parts.
OLMOE = register_policy(
    replace(
        LLAMA,
        layer_class="OlmoeDecoderLayer",
        q_norm="self_attn.q_norm",
        k_norm="self_attn.k_norm",
        qk_norm_width="whole",
        moe=MoEPolicy(normalizes="norm_topk_prob"),
        required={"clip_qkv": None},
    )
)

OLMO_HYBRID_ATTENTION = register_policy(replace(OLMO2, layer_class="OlmoHybridAttentionDecoderLayer"))

OLMO_HYBRID_DELTA = register_policy(
    replace(
        LLAMA,
        layer_class="OlmoHybridLinearAttentionDecoderLayer",
        norm="rms_fp32",
        mixers={
            "linear_attention": GatedDeltaPolicy(
                inputs=("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
                norm="o_norm",
                output="o_proj",
                negative="linear_allow_neg_eigval",
            )
        },
    )
)
