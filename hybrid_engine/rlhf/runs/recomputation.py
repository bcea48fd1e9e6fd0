"""Activations that are computed again in the backward pass instead of being kept."""

from typing import Any

from torch import nn

from hybrid_engine.rlhf.data.sequences import ValueModel


def recompute_activations(model: nn.Module, config: Any) -> nn.Module:
    """`model`, whose layers keep only what goes into them under `config.activation_checkpointing`.

    Raises:
        ValueError: transformers has no recomputation for its layers.
    """
    if not config.activation_checkpointing:
        return model
    inner: Any = model.backbone if isinstance(model, ValueModel) else model
    if not getattr(inner, "supports_gradient_checkpointing", False):
        raise ValueError(
            f"--activation-checkpointing: transformers recomputes no layers of {type(inner).__name__}; leave it out"
        )
    # The name since transformers 5.23 first.
    enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return model
