"""Chooses the parts of a module that are gathered and reduced one at a time: its layers, at any depth.

A part can be gathered alone if its parameters are used only in its own forward pass. So the part itself must be called,
which a container never is, and it must not share a parameter with modules outside of it. If a layer cannot be gathered
alone, those of its parts that can are. All other parameters belong to the rest, which is whole during the entire pass.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from hybrid_engine.distributed.processes import get_world_size

LEAST_SHARE_OF_LIST = 0.1
"""Share of a model's parameters that a list must hold; smaller ones, such as heads of which one is used, may stay
gathered.
"""
LEAST_SHARE_OF_PART = 1 / 16
"""Share of the largest sibling's parameters that a part must hold; a norm does not justify a collective of its own."""

Use = tuple[nn.Module, nn.Parameter]
"""A module, and a parameter that its own code uses."""


@dataclass(frozen=True)
class LayerGroups:
    """The parts of a module that are gathered separately."""

    modules: list[nn.Module]
    """The parts in the order in which they are registered; none is inside another."""
    exceptions: list[str]
    """Layers that are gathered in parts, or with the rest, because another module uses one of their parameters too."""


def find_layers(root: nn.Module) -> list[nn.Module]:
    """The layers of `root`, once each: the items of all lists with at least `LEAST_SHARE_OF_LIST` of its parameters.

    Their classes may differ, and a model may have several such lists. Lists inside layers are not searched.
    """
    least = LEAST_SHARE_OF_LIST * _count([root])
    lists = [items for items in _find_lists(root) if _count(items) >= least]
    return list(dict.fromkeys(item for items in lists for item in items))


def _find_lists(module: nn.Module) -> Iterator[list[nn.Module]]:
    for child in module.children():
        items = [item for item in child.children() if _count([item]) > 0]
        if _holds_layers(child, items):
            yield items
        else:
            yield from _find_lists(child)


def _holds_layers(module: nn.Module, items: list[nn.Module]) -> bool:
    """Whether `module` is a list of layers: a ModuleList, or another container of modules of one class."""
    if isinstance(module, nn.ModuleList):
        return bool(items)
    if has_forward(module) and not isinstance(module, nn.Sequential):
        return False
    kinds = [type(item) for item in items if any(True for _ in item.children())]
    return len(kinds) == len(items) > len(set(kinds))


def has_forward(module: nn.Module) -> bool:
    """Whether `module` can be called; containers cannot."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def is_forward_method(name: str) -> bool:
    """Whether a method of this name is a forward pass, such as a value model's `forward_value`."""
    return name.startswith("forward_")


def check_uncompiled(function: str, model: nn.Module) -> None:
    """Raises ValueError for what `torch.compile(model)` returns, a module around the model; local."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise ValueError(
            f"{function}(): model is what torch.compile() returned, which has no generate() of its own; pass the model "
            "itself, after model.compile() if its forward should be compiled"
        )


def check_callable(model: nn.Module) -> None:
    """Raises ValueError if several processes cannot share the model because it is never called."""
    if get_world_size() > 1 and not has_forward(model) and not any(map(is_forward_method, dir(type(model)))):
        raise ValueError(
            f"model: {type(model).__name__} has no forward(), and no method named forward_..., around which the "
            f"parameters outside the layers are gathered; pass a module that calls its parts, or train on one process"
        )


def find_groups(root: nn.Module, uses: Iterable[Use] = ()) -> LayerGroups:
    """The parts of `root` that are gathered separately.

    Args:
        root: the module, before it is wrapped.
        uses: uses of parameters in addition to those by the modules that they are registered in.
    """
    users = _Users(root, uses)
    groups, exceptions = [], []
    for layer in find_layers(root):
        if shared := users.find_shared(layer):
            exceptions.append(f"{users.paths[layer][0]} ({type(layer).__name__}), whose {shared} is used elsewhere too")
        groups += _split(layer, users)
    return LayerGroups(list(dict.fromkeys(groups)), exceptions)


class _Users:
    """Finds the modules that use each parameter."""

    def __init__(self, root: nn.Module, uses: Iterable[Use]) -> None:
        self.paths: dict[nn.Module, list[str]] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            self.paths.setdefault(module, []).append(path)
        registered = [(module, param) for module in self.paths for param in module.parameters(recurse=False)]
        self._users: dict[int, set[str]] = {}
        for module, param in [*registered, *uses]:
            self._users.setdefault(id(param), set()).update(self.paths[module])

    def find_shared(self, module: nn.Module) -> str | None:
        """The name of a parameter of `module` that is used outside of it, or None."""
        inside = tuple(f"{path}." for path in self.paths[module])
        for name, param in module.named_parameters():
            if not all(f"{user}.".startswith(inside) for user in self._users[id(param)]):
                return name
        return None


def _split(module: nn.Module, users: _Users) -> list[nn.Module]:
    """`module` if it can be gathered alone, otherwise those of its parts that can."""
    if has_forward(module) and users.find_shared(module) is None:
        return [module]
    children = list(module.children())
    least = LEAST_SHARE_OF_PART * max((_count([child]) for child in children), default=0)
    return [group for child in children if _count([child]) >= max(least, 1) for group in _split(child, users)]


def _count(modules: Iterable[nn.Module]) -> int:
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())
