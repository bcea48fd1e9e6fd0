"""DeepSeek-V2 and V3, and families with their layers: latent attention, experts in groups, dense first layers.

GLM-4.7-Flash has V3's layer; the text part of Kimi K2.5 is a V3. Mistral 4 multiplies queries at late positions.

Routers: V3, GLM-4.7-Flash and GLM-4-MoE score by sigmoids in fp32, to which a bias is added that only chooses. V2
scores by softmax, chooses groups by their best expert and does not normalize (`norm_topk_prob` is not read by
transformers' module). Mistral 4 scores by softmax and normalizes.
"""

from dataclasses import replace

from hybrid_engine.containers.latent import LatentPolicy
from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import MoEPolicy, register_policy

SHARED_EXPERTS = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj")

DEEPSEEK_V3_MOE = MoEPolicy(
    fp32_logits=True,
    scoring="sigmoid_then_topk",
    choice_bias="mlp.gate.e_score_correction_bias",
    groups=("n_group", "topk_group"),
    factor="routed_scaling_factor",
    normalizes="norm_topk_prob",
    shared=SHARED_EXPERTS,
)
"""The experts of DeepSeek-V3, GLM-4.7-Flash and GLM-4-MoE."""

DEEPSEEK_V2_MOE = replace(DEEPSEEK_V3_MOE, scoring="softmax_then_topk", choice_bias=None, groups=None, normalizes=False)

DEEPSEEK_V2_GROUPED_MOE = replace(DEEPSEEK_V2_MOE, groups=("n_group", "topk_group"), group_best=1)

MISTRAL4_MOE = replace(DEEPSEEK_V3_MOE, fp32_logits=False, scoring="softmax_then_topk", choice_bias=None)

DEEPSEEK_V3 = register_policy(
    replace(
        LLAMA,
        layer_class=("DeepseekV3DecoderLayer", "Glm4MoeLiteDecoderLayer"),
        mixers={None: LatentPolicy()},
        moe=DEEPSEEK_V3_MOE,
        is_interleaved=True,
        required={"rope_interleave": True},
    )
)

DEEPSEEK_V3_HALVES = register_policy(replace(DEEPSEEK_V3, is_interleaved=False, required={"rope_interleave": False}))

DEEPSEEK_V2 = register_policy(
    replace(DEEPSEEK_V3, layer_class="DeepseekV2DecoderLayer", moe=DEEPSEEK_V2_MOE, required={"topk_method": "greedy"})
)

DEEPSEEK_V2_GROUPED = register_policy(
    replace(DEEPSEEK_V2, moe=DEEPSEEK_V2_GROUPED_MOE, required={"topk_method": "group_limited_greedy"})
)

MISTRAL4 = register_policy(
    replace(
        DEEPSEEK_V3,
        layer_class="Mistral4DecoderLayer",
        mixers={None: LatentPolicy(position_scaling="llama_4_scaling_beta")},
        moe=MISTRAL4_MOE,
    )
)

MISTRAL4_HALVES = register_policy(replace(MISTRAL4, is_interleaved=False, required={"rope_interleave": False}))
