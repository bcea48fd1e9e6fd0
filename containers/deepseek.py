"""DeepSeek-V2 and V3, and families with their layers: latent attention, experts in groups, dense first layers.

Routers: V3, GLM-4.7-Flash and GLM-4-MoE score by sigmoids in fp32, to which a bias is added that only chooses. V2
scores by softmax, chooses groups by their best expert and does not normalize (`norm_topk_prob` is not read by
transformers' module). Mistral 4 scores by softmax and normalizes.
"""

from dataclasses import replace

from hybrid_engine.containers.policy import MoEPolicy

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
