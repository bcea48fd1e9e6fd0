"""A policy says where a family's decoder layer keeps its weights and what kind of layer it is. No computation here.

Paths are attribute names joined by dots, from the layer or, where stated, from the decoder: the module that holds the
list of layers. Names are those of config attributes. A new family of known pieces only needs a registered policy:

    register_policy(replace(LLAMA, layer_class="MistralDecoderLayer", window="sliding_window"))

Several policies may share a layer class: the first one whose `required` values the config has applies.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import nn

from hybrid_engine.ops.moe_gating import Scoring

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hybrid_engine.containers.layer import InferenceLayer, LayerMixer
    from hybrid_engine.containers.model import LayerStream
    from hybrid_engine.containers.views import NormView, TensorParallel

NormKind = Literal["layer", "rms", "rms_fp32", "rms_offset"]


@dataclass(frozen=True, kw_only=True)
class MoEPolicy:
    """Policy of one family's mixture-of-experts block: where it keeps its weights, and its kind.

    Paths are relative to the decoder layer. Sizes and config values are read from the modules and the config. X
    experts, E hidden size, I MLP size.
    """

    router: str = "mlp.gate"
    # Module with the router's `weight [X, E]` and optional `bias [X]`; its product is in their dtype.
    fp32_logits: bool = False
    # Whether that product is in fp32 instead.
    scoring: Scoring = "softmax_then_topk"
    # Function of the logits, and its order with selection.
    choice_bias: str | None = None
    # Tensor [X] in the layer that is added to the scores which choose, and not to the weights.
    groups: tuple[str, str] | None = None
    # Config attributes with the number of groups of experts, and of groups that a token may choose from.
    group_best: int = 2
    # Number of a group's best scores whose sum is the group's score.
    factor: str | None = None
    # Config attribute with the factor of the routing weights.
    normalizes: bool | str = True
    # Whether the selected weights are divided by their sum; a string names the config value that decides it.
    fp32_weights: bool = False
    # Whether routing weights stay fp32 instead of being rounded to the dtype of the logits.
    jitter: str | None = None
    # Config attribute with the jitter of the sparse mixer.
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
    # Config attribute that names the activation, or the activation; None: the clamped SwiGLU, with its numbers from
    # `experts`.
    shared: tuple[str | None, str, str] | None = None
    # Gate, up and down linear of an expert that sees every token; the first two are equal if both are one linear, and
    # the first is None if it has no gate.
    shared_gate: str | None = None
    # Linear [1, E] whose sigmoid is that expert's weight.
    latent: tuple[str, str] | None = None
    # Linears before and after the experts, in layers that have them: experts then see a narrower vector.
    scales_input: bool = False
    # Whether an expert's input is multiplied by its weight instead of its output.
    residual: tuple[str, str, str] | None = None
    # Up and down linear of a dense MLP in addition to the experts, and the linear [2, E] whose softmax weights experts
    # and MLP; for layers that have the third one.


class UnsupportedModelError(ValueError):
    """Inference containers cannot run the model, or a part of it; the message says which part and why."""


class MixerPolicy(Protocol):
    """Policy of a mixer other than attention over keys and values; it is in the file of the mixer that it builds."""

    def build(
        self,
        policy: "Policy",
        layer: nn.Module,
        config: "PretrainedConfig",
        index: int,
        norm: "NormView | None",
        parallel: "TensorParallel",
    ) -> "LayerMixer":
        """Builds the mixer of layer `index`; `norm` is applied before its projections, None: no norm.

        Raises UnsupportedModelError if `layer` has another one.
        """


@dataclass(frozen=True, kw_only=True)
class TemperaturePolicy:
    """Policy of attention whose temperature falls with the position (Nakanishi 2025, arXiv 2501.19399).

    Queries are multiplied by `1 + strength * log(1 + floor((position + offset) / length))`.
    """

    strength: str
    # Name of the strength; dots lead into dictionaries of the config.
    length: str
    # Name of the number of tokens after which the factor rises.
    offset: int = 0
    # Number that is added to the position.
    switch: str | None = None
    # Name of the switch of it all, which is on if there is none.
    has_rope: bool
    # Whether it is in layers with rotary embedding, or in those without.


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Policy of one family. Everything else (sizes, eps, biases) is read from the modules and the config."""

    layer_class: str | tuple[str, ...] | None
    # Class name of the decoder layer, or names if a model has layers of several classes; None: any class that has all
    # modules of a layer that the policy names.
    is_encoder: bool = False
    # Whether tokens also see those after them. The model runs its own embeddings and heads around these layers and
    # generates nothing; fields for modules outside the layers are not used.
    layer: "type[InferenceLayer] | None" = None
    # Class of the inference layer, for a block of the family's own; None: the one that `block` describes.
    stream: "type[LayerStream] | None" = None
    # Class of what the layers pass on where it is more than a hidden state.

    norm: NormKind
    # Kind of every norm, see `ops.norm`.
    block: Literal["pre_norm", "post_norm", "parallel"] = "pre_norm"
    # pre_norm: x += attention(norm(x)); x += mlp(norm(x)). post_norm: x = norm(x + attention(x)); x = norm(x + mlp(x)).
    # parallel: x += attention(norm(x)) + mlp(norm(x)), with one norm for both where `mlp_norm` is None.

    attention_norm: str | None
    # Norm before attention; in post_norm, after it. None: no norm.
    attention_post_norm: str | None = None
    # Norm of attention's output before it is added.
    mlp_norm: str | None
    # Norm before the MLP; in post_norm, after it. None: no norm.
    mlp_post_norm: str | None = None
    # Norm of the MLP's output before it is added.
    residual_scale: str | None = None
    # Name of the factor of the outputs of attention and MLP before they are added; in pre_norm blocks.

    mixers: Mapping[str | None, MixerPolicy] = field(default_factory=dict)
    # Mixers in place of attention, by kind of layer (`layer_kinds`); key None: of all kinds that are not named.
    mlp_kinds: tuple[str, ...] | None = None
    # Kinds of layers that are an MLP alone, in a family whose other layers are a mixer alone; None: layers have both.
    qkv: tuple[str, ...]
    # Query, key and value projections: three paths, or the one fused projection.
    qkv_layout: Literal["blocks", "grouped"] = "blocks"
    # Rows of a fused projection: [q | k | v], or by key/value head [its queries, key, value].
    attention_output: str
    # Projection of the context.
    gates_context: bool = False
    # Whether the first projection has, for each query head, the query and a gate, whose sigmoid the context is
    # multiplied by.
    scale: str | float | None = None
    # Multiplies q.k: path of the attribute that holds the factor, a number, or None for head_dim ** -0.5.
    num_kv_heads: str | int = "num_key_value_heads"
    # Name of the config's number of key/value heads, or the number.
    q_norm: str | None = None
    # Norm of queries before rotary.
    k_norm: str | None = None
    # Norm of keys before rotary.
    qk_norm_width: Literal["head", "whole", "each_head"] = "head"
    # Extent of these norms: one head, all heads together, or one head with weights of its own.
    is_qk_norm_last: bool = False
    # Whether these norms come after rotary embedding.
    norms_rotated_heads: bool = False
    # Whether layers without rotary embedding do not have these norms.
    temperature: TemperaturePolicy | None = None
    # The temperature of attention, if it changes with the position.
    sinks: str | None = None
    # Parameter [H], an additional logit per head.
    softcap: str | None = None
    # Name of the soft-capping of attention's scores.
    window: str | None = None
    # Name of the sliding window.
    chunk: str | None = None
    # Name of the number of tokens of a chunk, in layers of kind "chunked_attention": a token sees those of its chunk.
    layer_kinds: str | None = "layer_types"
    # Name of the list of layer kinds, of which "sliding_attention" and "local" have the window; None, or a config
    # without the list: all layers have it.

    rotary: str | None = None
    # In the decoder: the rotary embedding, if the family has one.
    rotary_dim: str | None = None
    # Name of the number of rotated dimensions, if there is no module; frequencies of base 10000.
    is_interleaved: bool = False
    # Whether rotated pairs are adjacent instead of in two halves.
    is_backwards: bool = False
    # Whether pairs are rotated by the negative angle.
    rope_layers: str | None = None
    # Name of a list that holds 1 for layers with rotary embedding and 0 for those without.
    is_rope_local: bool = False
    # Whether layers without a window have no rotary embedding, in models with a window.
    recomputes_longrope: bool = False
    # Whether keys of earlier tokens are recomputed with longrope's long frequencies when these take effect.
    rope_factors: tuple[str, str] | None = None
    # Keys of the config's `rope_parameters` with the factors of cosines and sines up to the trained length and beyond,
    # if the frequencies of longrope are the short ones at any length; the factors must be equal.
    alibi: str | None = None
    # Name of the switch of ALiBi biases, which is on if the config does not have it; they replace rotary embedding.
    is_alibi_rounded: bool = False
    # Whether the biases are rounded to bf16 and multiplied by `scale`.
    position_embedding: str | None = None
    # In the decoder, or in the model: the table of learned positions, if the family has one.
    position_offset: int = 0
    # Row of that table for position 0.

    up: str
    # First linear of the MLP; in a fused one, the gate's columns come first.
    down: str
    # Last linear of the MLP.
    gate: str | None = None
    # The gate of a gated MLP; equal to `up` if both are one linear.
    activation: str = "hidden_act"
    # Name of the activation in the config, or the activation itself if the config does not have that name.
    xielu: str | None = None
    # Module with the learned numbers of the activation, if that is xIELU.
    moe: MoEPolicy | None = None
    # The mixture of experts, in layers that have its router.

    embedding_scale: str | None = None
    # Name of the factor of the embedded tokens.
    padded_tokens: tuple[str, ...] = ()
    # Names, in the config of a class that has more than text, of tokens that are embedded as padding.
    embedding_norm: str | None = None
    # In the decoder: norm of the embedded tokens.
    project_in: str | None = None
    # In the decoder: linear after the embedding, if the model has one.
    project_out: str | None = None
    # In the decoder: linear before the LM head, if the model has one.
    final_norm: str | None = "norm"
    # In the decoder: the norm before the LM head; None: no norm.
    logit_softcap: str | None = None
    # Name of the soft-capping of the LM head's logits.
    logit_scale: str | None = None
    # Name of the factor of these logits.
    logit_divisor: str | None = None
    # Name of the number that they are divided by.

    required: dict[str, Any] = field(default_factory=dict)
    # Config values that the layer described here requires.


POLICIES: dict[str, list[Policy]] = {}
POLICIES_BY_NAMES: list[Policy] = []


def register_policy(policy: Policy) -> Policy:
    """Registers `policy` for its layer class and returns it.

    It replaces an earlier policy with equal `required`, and takes precedence over the others of its class. A policy
    without a layer class comes after those with one.
    """
    if policy.layer_class is None:
        POLICIES_BY_NAMES.append(policy)
        return policy
    for name in (policy.layer_class,) if isinstance(policy.layer_class, str) else policy.layer_class:
        others = [other for other in POLICIES.get(name, []) if other.required != policy.required]
        POLICIES[name] = [policy, *others]
    return policy


def find_policy(layer_class: str, config: "PretrainedConfig") -> Policy | None:
    """Returns the policy for a layer class under `config`; None if the class has none.

    Raises UnsupportedModelError if the class has policies and the config meets none of them.
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


def submodule(root: nn.Module, path: str) -> nn.Module:
    """Returns the module at `path`; raises UnsupportedModelError, which names both, if there is none."""
    try:
        return root.get_submodule(path)
    except AttributeError as error:
        raise UnsupportedModelError(f"{type(root).__name__} has no {path!r}, which its policy names") from error


def has_module(root: nn.Module, path: str) -> bool:
    """Whether there is a module at `path`."""
    try:
        root.get_submodule(path)
    except AttributeError:
        return False
    return True


def attribute(root: nn.Module, path: str) -> Any:
    """Returns the attribute at `path`, a parameter or a number."""
    owner, _, name = path.rpartition(".")
    module = submodule(root, owner) if owner else root
    if not hasattr(module, name):
        raise UnsupportedModelError(f"{type(root).__name__} has no {path!r}, which its policy names")
    return getattr(module, name)


def config_value(config: "PretrainedConfig", name: str) -> Any:
    """Returns the config's value of `name`, whose dots lead into dictionaries.

    Raises UnsupportedModelError if it has none.
    """
    attribute_name, *keys = name.split(".")
    try:
        value = getattr(config, attribute_name)
        for key in keys:
            value = value[key]
    except (AttributeError, KeyError, TypeError) as error:
        raise UnsupportedModelError(f"{type(config).__name__} has no {name!r}, which the policy names") from error
    return value


def class_name(module: nn.Module) -> str:
    """Qualified class name of `module` with its package, because adapters have the class names of what they adapt."""
    return f"{type(module).__module__}.{type(module).__qualname__}"
