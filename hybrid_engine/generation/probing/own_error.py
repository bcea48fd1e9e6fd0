"""How far rounding alone takes a model's log-probabilities: its forward pass in 16 bits against the same in fp32.

There is no second copy of the model: each layer's parameters are widened while it runs, and then the old ones stand
there again.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

Parameters = list[tuple[dict[str, Any], str, Any]]
"""The dictionary that a parameter stands in, its name there, and the parameter."""


@contextmanager
def widened(module: nn.Module, layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, forward passes of `module` compute in fp32; `layers` are those parts that are widened as one."""
    handles: list[Any] = []
    for unit in _units(module, set(layers)):
        kept: Parameters = []
        handles.append(unit.register_forward_pre_hook(_widening(kept), with_kwargs=True))
        # First of all hooks, before FSDP2 takes the gathered parameters away; also after an error.
        handles.append(unit.register_forward_hook(_restoring(kept), prepend=True, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _units(module: nn.Module, layers: set[nn.Module]) -> Iterator[nn.Module]:
    """Parts that are widened while they run: layers, and what has parameters of its own outside of them."""
    if module in layers:
        yield module
        return
    if any(parameter is not None for parameter in module._parameters.values()):
        yield module
    for child in module.children():
        yield from _units(child, layers)


def _widening(kept: Parameters) -> Any:
    def widen(unit: nn.Module, args: Any, kwargs: Any) -> Any:
        for part in unit.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    kept.append((part._parameters, name, parameter))
                    part._parameters[name] = nn.Parameter(parameter.detach().float(), requires_grad=False)
        return tree_map(_wide, (args, kwargs))

    return widen


def _restoring(kept: Parameters) -> Any:
    def restore(*_: Any) -> None:
        for parameters, name, parameter in kept:
            parameters[name] = parameter
        kept.clear()

    return restore


def _wide(value: Any) -> Any:
    is_narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_narrow else value
