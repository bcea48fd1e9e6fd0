"""What a sharded module returns is no view of another tensor, so that callers may change it in place.

FSDP2 puts a hook on each output of a module, which gathers the module's parameters before its backward pass. An
in-place operation on a view, as `values += 1` after `hidden.view(-1)` or a linear with a bias, takes the output's place
in autograd and the hook with it: the backward pass then fails or leaves gradients unreduced. PyTorch warns of each view
(from 2.13 on). A copy has no such risk, and costs one pass over an output that is a view.
"""

from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map


def copy_views_in_outputs(module: nn.Module) -> None:
    """From now on `module(...)` returns copies of views; to be called before FSDP2 sets its own hooks."""
    module.register_forward_hook(_copy_after_forward)


def copy_views_in_outputs_of(module: nn.Module, method_name: str) -> None:
    """Copies views in what one method of a module returns."""
    method = getattr(module, method_name)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _copy_views(method(*args, **kwargs))

    setattr(module, method_name, call)


def _copy_after_forward(module: nn.Module, args: Any, output: Any) -> Any:
    return _copy_views(output)


def _copy_views(output: Any) -> Any:
    leaves, _ = tree_flatten(output)
    if not any(_is_view(leaf) for leaf in leaves):
        return output
    return tree_map(lambda leaf: leaf.clone() if _is_view(leaf) else leaf, output)


def _is_view(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value._base is not None
