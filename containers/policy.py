"""A policy says where a family's decoder layer keeps its weights and what kind of layer it is. It computes nothing.

Paths are attribute names joined by dots, from the layer or, where said, from the decoder: the module that
holds the list of layers. Registering a policy is all that a new family of known pieces takes:

    register_policy(replace(LLAMA, layer_class="MistralDecoderLayer"))
"""

from dataclasses import dataclass, field
from typing import Any, Literal


class UnsupportedModelError(ValueError):
    """The model, or a part of it, cannot run on inference containers; the message says which and why."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """One family. Everything else (heads, eps, scale, biases) is read off the modules and the config."""

    layer_class: str
    # Class name of the decoder layer.
    norm: Literal["rms", "layer"]
    # Kind of every norm in the layer, and of the final one.
    attention_norm: str
    # Norm before attention.
    attention: str
    # The attention module; its `scaling` multiplies q.k.
    qkv: tuple[str, ...]
    # Query, key and value projections: three paths, or the one fused projection.
    attention_output: str
    # Projection of the context.
    mlp_norm: str
    # Norm before the MLP.
    up: str
    # First linear of the MLP.
    down: str
    # Last linear of the MLP.
    gate: str | None = None
    # The gate of a gated MLP.
    q_norm: str | None = None
    # RMS norm over the head dimension of queries.
    k_norm: str | None = None
    # The same of keys.
    activation: str = "hidden_act"
    # Config attribute that names the activation.
    final_norm: str = "norm"
    # In the decoder: the norm before the LM head.
    rotary: str | None = None
    # In the decoder: the rotary embedding, where the family has one.
    position_embedding: str | None = None
    # In the decoder: the table of learned positions, where the family has one.
    position_offset: int = 0
    # Row of that table for position 0.
    has_window: bool = False
    # The layer obeys the config's `sliding_window`.
    required: dict[str, Any] = field(default_factory=dict)
    # Config values without which the layer is another one than described here.
    absent: tuple[str, ...] = ()
    # In the decoder: modules that must be missing or None.


POLICIES: dict[str, Policy] = {}


def register_policy(policy: Policy) -> Policy:
    """Makes `policy` known for its layer class, replacing an earlier one, and returns it."""
    POLICIES[policy.layer_class] = policy
    return policy
