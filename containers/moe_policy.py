"""Policy of a family's mixture-of-experts block: where it keeps its weights, and its kind. Contains no computation.

Paths are attribute names joined by dots, from the decoder layer. X experts, E hidden size, I MLP size.
"""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class MoEPolicy:
    """Policy of one family's block. Sizes and config values are read from the modules and the config."""

    router: str = "mlp.gate"
    # Module with the router's `weight [X, E]` and optional `bias [X]`; its product is in their dtype.
    scoring: Literal["softmax_then_topk", "topk_then_softmax"] = "softmax_then_topk"
    # Order of softmax and selection.
    normalizes: bool | str = True
    # Whether the selected weights are divided by their sum; a string names the config value that decides it.
    fp32_weights: bool = False
    # Whether routing weights stay fp32 instead of being rounded to the dtype of the logits.
    top_k: str = "num_experts_per_tok"
    # Config attribute with the number of experts per token.
    experts: str = "mlp.experts"
    # Module that holds the stacked experts.
    is_list: bool = False
    # Whether `experts` is a list of modules instead; `up` and `down` then name linears of each.
    up: str = "gate_up_proj"
    # In `experts`: first weights of all experts, `[X, 2 I, E]` if gated.
    up_bias: str | None = None
    # In `experts`: biases of `up`.
    down: str = "down_proj"
    # In `experts`: last weights, `[X, E, I]`.
    down_bias: str | None = None
    # In `experts`: biases of `down`.
    is_stored_transposed: bool = False
    # Whether weights are stored as `[X, in, out]` instead.
    layout: Literal["plain", "halves", "interleaved"] = "halves"
    # Position of the gate in `up`: none, in the first half, or in every other column, gate first.
    activation: str | None = "hidden_act"
    # Config attribute that names the activation; None: the clamped SwiGLU, with its numbers from `experts`.
    shared: tuple[str, str, str] | None = None
    # Gate, up and down linear of an expert that sees every token.
    shared_gate: str | None = None
    # Linear [1, E] whose sigmoid is that expert's weight.
    residual: tuple[str, str, str] | None = None
    # Up and down linear of a dense MLP in addition to the experts, and the linear [2, E] whose softmax weights experts
    # and MLP; for layers that have the third one.


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
