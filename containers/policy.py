"""A policy says where a family's decoder layer keeps its weights and what kind of layer it is. It computes nothing.

Paths are attribute names joined by dots, from the layer or, where said, from the decoder: the module that
holds the list of layers. Names are of config attributes. Registering a policy is all that a new family of
known pieces takes:

    register_policy(replace(LLAMA, layer_class="MistralDecoderLayer", window="sliding_window"))

Several policies may share a layer class: the first one whose `required` the config meets is the layer's.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from hybrid_engine.containers.moe_policy import MoEPolicy


class UnsupportedModelError(ValueError):
    """The model, or a part of it, cannot run on inference containers; the message says which and why."""


NormKind = Literal["layer", "rms", "rms_fp32", "rms_offset"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """One family. Everything else (sizes, eps, biases) is read off the modules and the config."""

    layer_class: str | None
    # Class name of the decoder layer; None: any class that has all modules of a layer that are named here.
    is_encoder: bool = False
    # Tokens see those after them too. The model runs its own embeddings and heads around these layers, generates
    # nothing, and fields for what stands outside the layers say nothing.
    norm: NormKind
    # Kind of every norm, see `ops.norm`.
    block: Literal["pre_norm", "post_norm", "parallel"] = "pre_norm"
    # pre_norm: x += attention(norm(x)); x += mlp(norm(x)). post_norm: x = norm(x + attention(x)); x = norm(x + mlp(x)).
    # parallel: x += attention(norm(x)) + mlp(norm(x)), with one norm for both where `mlp_norm` is None.

    attention_norm: str | None
    # Norm before attention; of post_norm, the one after it. None: no norm.
    attention_post_norm: str | None = None
    # Norm of attention's output before it is added.
    mlp_norm: str | None
    # The same two of the MLP.
    mlp_post_norm: str | None = None

    qkv: tuple[str, ...]
    # Query, key and value projections: three paths, or the one fused projection.
    qkv_layout: Literal["blocks", "grouped"] = "blocks"
    # Rows of a fused projection: [q | k | v], or by key/value head [its queries, key, value].
    attention_output: str
    # Projection of the context.
    scale: str | float | None = None
    # Multiplies q.k: path of the attribute that holds it, a number, or None for head_dim ** -0.5.
    num_kv_heads: str | int = "num_key_value_heads"
    # Name of the config's number of key/value heads, or the number.
    q_norm: str | None = None
    # Norm of queries before rotary.
    k_norm: str | None = None
    # The same of keys.
    qk_norm_width: Literal["head", "whole", "each_head"] = "head"
    # What these norms span: one head, all heads together, or one head with weights of its own.
    sinks: str | None = None
    # Parameter [H], a further logit per head.
    softcap: str | None = None
    # Name of the soft-capping of attention's scores.
    window: str | None = None
    # Name of the sliding window.
    layer_kinds: str | None = "layer_types"
    # Name of the list of layer kinds, of which "sliding_attention" and "local" have the window; None, or a config
    # without the list: all have.

    rotary: str | None = None
    # In the decoder: the rotary embedding, where the family has one.
    rotary_dim: str | None = None
    # Name of the number of rotated dimensions, where there is no module; frequencies of base 10000.
    is_interleaved: bool = False
    # Rotated pairs are neighbours instead of halves.
    rope_layers: str | None = None
    # Name of a list that holds 1 for layers with rotary embedding and 0 for those without.
    recomputes_longrope: bool = False
    # Where longrope's frequencies switch, the keys of the tokens before are computed anew with the long ones.
    alibi: str | None = None
    # Name of the switch of ALiBi biases, which is on where the config has none; they replace rotary embedding.
    is_alibi_rounded: bool = False
    # The biases are rounded to bf16 and multiplied by `scale`.
    position_embedding: str | None = None
    # In the decoder, or in the model: the table of learned positions, where the family has one.
    position_offset: int = 0
    # Row of that table for position 0.

    up: str
    # First linear of the MLP; of a fused one, the gate's columns come first.
    down: str
    # Last linear of the MLP.
    gate: str | None = None
    # The gate of a gated MLP; equal to `up` where both are one linear.
    activation: str = "hidden_act"
    # Name of the activation, or the activation where the config has no such name.
    moe: MoEPolicy | None = None
    # The mixture of experts, in layers that have its router.

    embedding_norm: str | None = None
    # In the decoder: norm of the embedded tokens.
    project_in: str | None = None
    # In the decoder: linear after the embedding, where the model has one.
    project_out: str | None = None
    # In the decoder: linear before the LM head, where the model has one.
    final_norm: str | None = "norm"
    # In the decoder: the norm before the LM head; None: no norm.
    logit_softcap: str | None = None
    # Name of the soft-capping of the LM head's logits.

    required: dict[str, Any] = field(default_factory=dict)
    # Config values without which the layer is another one than described here.


POLICIES: dict[str, list[Policy]] = {}
POLICIES_BY_NAMES: list[Policy] = []


def register_policy(policy: Policy) -> Policy:
    """Makes `policy` known for its layer class and returns it.

    It replaces an earlier one of equal `required`, and comes before those that were there. One without a layer
    class comes after those with one.
    """
    if policy.layer_class is None:
        POLICIES_BY_NAMES.append(policy)
        return policy
    others = [other for other in POLICIES.get(policy.layer_class, []) if other.required != policy.required]
    POLICIES[policy.layer_class] = [policy, *others]
    return policy


def find_policy(layer_class: str, config: Any) -> Policy | None:
    """The policy for a layer class under `config`; None where the class has none.

    Raises UnsupportedModelError where it has some and the config meets none of them.
    """
    candidates = POLICIES.get(layer_class)
    if not candidates:
        return None
    for policy in candidates:
        if all(getattr(config, name, value) == value for name, value in policy.required.items()):
            return policy
    covered = " or ".join(
        ", ".join(f"{name}={value}" for name, value in policy.required.items()) for policy in candidates
    )
    names = sorted({name for policy in candidates for name in policy.required})
    found = ", ".join(f"{name}={getattr(config, name, None)}" for name in names)
    raise UnsupportedModelError(f"{layer_class} with {found}; its policies cover {covered}")
