"""Detects changes of a module's children, hooks and forward.

After a change the generator rebuilds its containers, and head passes of `rlhf/` are tried again.
"""

from typing import Any

from torch import nn

WITHOUT_EFFECT = ("hybrid_engine.", "torch.distributed.")
"""Packages whose hooks and forwards do not change what a module computes."""


def computes_by(module: nn.Module) -> tuple[Any, ...]:
    """Returns a value that stays equal while `module` has the same children and the same foreign hooks and forward."""
    children = tuple(module._modules.values())
    forward = vars(module).get("forward")
    if forward is None and not module._forward_hooks and not module._forward_pre_hooks:
        return children
    functions = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if "_original_forward" not in vars(module):  # accelerate's, for mixed precision
        functions.append(forward)
    return (children, *(function for function in functions if function is not None and _has_effect(function)))


def _has_effect(function: Any) -> bool:
    function = getattr(function, "func", function)  # unwraps a functools.partial
    return not str(getattr(function, "__module__", "")).startswith(WITHOUT_EFFECT)
