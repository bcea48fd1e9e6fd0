"""Where a family's mixture-of-experts block keeps its weights and what kind of block it is. It computes nothing.

Paths are attribute names joined by dots, from the decoder layer. X experts, E hidden size, I MLP size.
"""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class MoEPolicy:
    """One family's block. Sizes, and what the config names, are read off the modules and the config."""

    router: str = "mlp.gate"
    # Module with the router's `weight [X, E]` and, where it has one, `bias [X]`; its product is in their dtype.
    scoring: Literal["softmax_then_topk", "topk_then_softmax"] = "softmax_then_topk"
    # Order of softmax and choice.
    normalizes: bool | str = True
    # The chosen weights are divided by their sum; a string names the config value that says so.
    fp32_weights: bool = False
    # Routing weights stay fp32 instead of being rounded to the dtype of the logits.
    top_k: str = "num_experts_per_tok"
    # Config attribute: experts per token.
    experts: str = "mlp.experts"
    # Module that holds the stacked experts.
    is_list: bool = False
    # `experts` is a list of modules instead, and `up` and `down` name linears of each.
    up: str = "gate_up_proj"
    # In `experts`: first weights of all experts, `[X, 2 I, E]` where gated.
    up_bias: str | None = None
    # In `experts`: their biases.
    down: str = "down_proj"
    # In `experts`: last weights, `[X, E, I]`.
    down_bias: str | None = None
    # In `experts`: their biases.
    is_stored_transposed: bool = False
    # Weights are stored `[X, in, out]` instead.
    layout: Literal["plain", "halves", "interleaved"] = "halves"
    # Where `up` holds the gate: nowhere, in the first half, or in every other column, gate first.
    activation: str | None = "hidden_act"
    # Config attribute that names the activation; None: the clamped SwiGLU, its numbers from `experts`.
    shared: tuple[str, str, str] | None = None
    # Gate, up and down linear of an expert that sees every token.
    shared_gate: str | None = None
    # Linear [1, E] whose sigmoid weighs that expert.
    residual: tuple[str, str, str] | None = None
    # Up and down linear of a dense MLP beside the experts, in layers that have the third: the linear [2, E] whose
    # softmax weighs experts and MLP.


QWEN3_MOE = MoEPolicy(normalizes="norm_topk_prob")
QWEN2_MOE = replace(
    QWEN3_MOE,
    shared=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
    shared_gate="mlp.shared_expert_gate",
)
MIXTRAL = MoEPolicy(fp32_weights=True)
GPT_OSS = MoEPolicy(
    router="mlp.router",
    scoring="topk_then_softmax",
    up_bias="gate_up_proj_bias",
    down_bias="down_proj_bias",
    is_stored_transposed=True,
    layout="interleaved",
    activation=None,
)
DEEPSPEED_MOE = MoEPolicy(
    router="mlp.deepspeed_moe.gate.wg",
    normalizes="norm_topk_prob",
    experts="mlp.deepspeed_moe.experts.deepspeed_experts",
    is_list=True,
    up="dense_h_to_4h",
    down="dense_4h_to_h",
    layout="plain",
    residual=("mlp.mlp.dense_h_to_4h", "mlp.mlp.dense_4h_to_h", "mlp.coefficient"),
)
