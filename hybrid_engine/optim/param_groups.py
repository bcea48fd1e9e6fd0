"""Parameter groups by name: sharding and masters replace the parameters an optimizer was built on, but names stay."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

NamedGroup = dict[str, Any]
"""A torch parameter group with `names` (of the module's parameters) instead of `params`."""


def name_groups(model_parameters: Iterable[Any] | None, module: nn.Module) -> list[NamedGroup]:
    """Groups by name from parameters in any form that `torch.optim` accepts; None means all that require a gradient.

    Raises:
        ValueError: an entry is not a parameter or not one of `module`'s, a group has no parameters, or no parameter
            requires a gradient.
    """
    named = dict(module.named_parameters())
    if model_parameters is None:
        groups: list[NamedGroup] = [{"names": [name for name, param in named.items() if param.requires_grad]}]
    else:
        if not isinstance(model_parameters, Iterable):
            raise ValueError(f"model_parameters={model_parameters!r} must be parameters or groups of them; pass a list")
        names = {id(param): name for name, param in named.items()}
        groups = [_name_group(group, names) for group in _as_groups(list(model_parameters))]
    if not any(named[name].requires_grad for group in groups for name in group["names"]):
        raise ValueError(
            f"model_parameters: none of the {len(named)} parameters for the optimizer requires a gradient; "
            f"call requires_grad_() on those to be trained, or pass neither optimizer nor config['optimizer'] for an "
            f"evaluation engine"
        )
    return groups


def _as_groups(entries: list[Any]) -> list[dict[str, Any]]:
    return entries if entries and isinstance(entries[0], dict) else [{"params": entries}]


def _name_group(group: dict[str, Any], names: dict[int, str]) -> NamedGroup:
    if "params" not in group:
        raise ValueError(f'model_parameters: a group with {sorted(group)} has no "params"; name its parameters there')
    entries = group["params"]
    params = [entries] if isinstance(entries, torch.Tensor) else list(entries)
    params = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
    for index, param in enumerate(params):
        if not isinstance(param, torch.Tensor):
            raise ValueError(
                f"model_parameters: entry {index} of a group is a {type(param).__name__}, it must be a parameter; pass "
                f"model.parameters() or groups of them"
            )
        if id(param) not in names:
            raise ValueError(
                f"optimizer or model_parameters: parameter {index} of a group, of shape {tuple(param.shape)}, is not a "
                f"parameter of the model; use model.parameters() of the very model given to initialize()"
            )
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {**options, "names": [names[id(param)] for param in params]}


def build_groups(groups: list[NamedGroup], masters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """The groups for a new optimizer, on the masters; frozen parameters do not have one and are left out."""
    return [
        {
            **{key: value for key, value in group.items() if key != "names"},
            "params": [masters[name] for name in group["names"] if name in masters],
        }
        for group in groups
    ]


def repoint_groups(
    optimizer: torch.optim.Optimizer, groups: list[NamedGroup], masters: dict[str, nn.Parameter]
) -> None:
    """Makes an existing optimizer step the masters, in place, so that a scheduler built on it keeps working.

    The state that it was built with is moved to the masters too.
    """
    replaced = {}
    for group, named in zip(optimizer.param_groups, groups, strict=True):
        pairs = zip(group["params"], named["names"], strict=True)
        pairs_of_group = {param: masters[name] for param, name in pairs if name in masters}
        replaced.update(pairs_of_group)
        group["params"] = list(pairs_of_group.values())
        group.pop("param_names", None)
    carry_state(optimizer, replaced)


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` has state of steps; also True if its state does not count steps."""
    return any(float(entry.get("step", 1)) != 0 for entry in optimizer.state.values())


@torch.no_grad()
def carry_state(optimizer: torch.optim.Optimizer, masters: dict[nn.Parameter, nn.Parameter]) -> None:
    """Moves the state of parameters to their masters, in the masters' dtype, device and sharding; local.

    Args:
        optimizer: its groups hold the masters, its state still the parameters; the state of others is dropped.
        masters: the master of each parameter.
    """
    if not optimizer.state or all(param is master for param, master in masters.items()):
        return
    state = dict(optimizer.state)
    optimizer.state.clear()
    for param, entry in state.items():
        if param in masters:
            master = masters[param]
            optimizer.state[master] = {
                key: _shard(value, master) if _is_like(value, param) else value for key, value in entry.items()
            }
    optimizer.load_state_dict(optimizer.state_dict())  # casts and moves each entry to the form its optimizer needs


def _is_like(value: Any, param: nn.Parameter) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape


def _shard(value: torch.Tensor, master: Any) -> torch.Tensor:
    if not isinstance(master, DTensor) or isinstance(value, DTensor):
        return value
    mesh = master.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, master.placements, src_data_rank=None)
