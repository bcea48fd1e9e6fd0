"""What a sharded module returns is no view of another tensor, so that callers may change it in place, and no parameter.

FSDP2 puts a hook on each output of a module, which gathers the module's parameters before its backward pass. An
in-place operation on a view, as `values += 1` after `hidden.view(-1)` or a linear with a bias, takes the output's place
in autograd and the hook with it: the backward pass then fails or leaves gradients unreduced. PyTorch warns of each view
(from 2.13 on). A copy has no such risk, and costs one pass over an output that is a view.

The memory of a gathered parameter is freed after the backward pass, or the forward pass. An output that lies in it, as
a weight that a module returns or what `detach()` makes of one, would then be read where nothing is.
"""

from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map

from hybrid_engine.zero.sharding import local_tensor
from hybrid_engine.zero.unwrapping import EngineHook


def copy_views_in_outputs(module: nn.Module) -> None:
    """From now on `module(...)` returns copies of views and parameters; to be called before FSDP2 sets its hooks."""
    module.register_forward_hook(EngineHook(_copy_after_forward))


def copy_views_in_outputs_of(module: nn.Module, method_name: str) -> None:
    """Copies views and parameters in what one method of a module returns."""
    method = getattr(module, method_name)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _copy_views(module, method(*args, **kwargs))

    setattr(module, method_name, call)


def _copy_after_forward(module: nn.Module, args: Any, output: Any) -> Any:
    return _copy_views(module, output)


def _copy_views(module: nn.Module, output: Any) -> Any:
    leaves, _ = tree_flatten(output)
    held = {_memory(parameter) for parameter in module.parameters()} - {None, 0}

    def must_be_copied(leaf: Any) -> bool:
        return _is_view(leaf) or _memory(leaf) in held

    if not any(must_be_copied(leaf) for leaf in leaves):
        return output
    return tree_map(lambda leaf: leaf.clone() if must_be_copied(leaf) else leaf, output)


def _is_view(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value._base is not None


def _memory(value: Any) -> int | None:
    """Where the memory that a tensor lies in begins, 0 where it is freed; None of what has none."""
    if isinstance(value, DTensor):
        value = local_tensor(value)
    is_dense = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
    return value.untyped_storage().data_ptr() if is_dense else None
