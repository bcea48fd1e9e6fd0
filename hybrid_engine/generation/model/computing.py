"""What a module computes by, besides its parameters: its children, and the hooks and forwards that others gave it."""

from typing import Any

from torch import nn

WITHOUT_EFFECT = ("hybrid_engine.", "torch.distributed.")
"""Whose hooks and forwards leave what a module computes as it is."""


def computes_by(module: nn.Module) -> tuple[Any, ...]:
    """Equal as long as `module` has the same children, and the same hooks and forward of its own from others."""
    children = tuple(module._modules.values())
    forward = vars(module).get("forward")
    if forward is None and not module._forward_hooks and not module._forward_pre_hooks:
        return children
    functions = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if "_original_forward" not in vars(module):  # accelerate's, for mixed precision
        functions.append(forward)
    return (children, *(function for function in functions if function is not None and _has_effect(function)))


def _has_effect(function: Any) -> bool:
    function = getattr(function, "func", function)  # of a functools.partial
    return not str(getattr(function, "__module__", "")).startswith(WITHOUT_EFFECT)
