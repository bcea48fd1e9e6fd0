"""An optimizer's state by the names of parameters, from its state dict and back into any optimizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.parallel.checkpoints.parts import part_like, whole_of

NAMES, NUMBERS, GROUP = "param_names", "param_numbers", "group_number"
"""What `build_optimizer` adds to groups: names of parameters, their places in the module, the user's number of it."""


@dataclass
class Group:
    """A parameter group as the user gave it."""

    options: dict[str, Any]
    numbers: dict[str, int] = field(default_factory=dict)
    """By the name of each of its parameters the place in the module."""

    @property
    def names(self) -> list[str]:
        """The group's parameters by name, in the module's order."""
        return sorted(self.numbers, key=self.numbers.__getitem__)


def named_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer of `build_optimizer` or of the training engine, with names in its groups."""
    if isinstance(optimizer, ZeroOptimizer):
        state = optimizer.inner.state_dict()
        names = {id(t.master): t.name for t in optimizer.parameters}
        for group, live in zip(state["param_groups"], optimizer.inner.param_groups, strict=True):
            group[NAMES] = [names[id(p)] for p in live["params"]]
        return state
    state = optimizer.state_dict()
    if not all(NAMES in group for group in state["param_groups"]):
        raise ValueError("the optimizer's groups have no param_names; make it by build_optimizer or initialize")
    return state


def merge_optimizer_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state dict, for `optimizer_fn` of the original module's parameters, from those of all processes.

    Its groups have `param_names`; their parameters are in the module's order.
    """
    groups: dict[int, Group] = {}
    found: dict[str, dict[str, list[Any]]] = {}
    for state in states:
        for position, group in enumerate(state["param_groups"]):
            merged = groups.setdefault(group.get(GROUP, position), Group(_options(group)))
            numbers = group.get(NUMBERS, range(len(merged.numbers), len(merged.numbers) + len(group[NAMES])))
            for key, name, number in zip(group["params"], group[NAMES], numbers, strict=True):
                merged.numbers.setdefault(name, number)
                for entry, value in state["state"].get(key, {}).items():
                    if value is not None:
                        found.setdefault(name, {}).setdefault(entry, []).append(value)
    merged_groups: list[dict[str, Any]] = []
    numbered: dict[str, int] = {}
    for _, group in sorted(groups.items()):
        start = len(numbered)
        numbered.update({name: start + position for position, name in enumerate(group.names)})
        keys = [numbered[name] for name in group.names]
        merged_groups.append({**group.options, "params": keys, NAMES: group.names})
    merged_state = {
        numbered[name]: {entry: _merged(values) for entry, values in entries.items()} for name, entries in found.items()
    }
    return {"state": merged_state, "param_groups": merged_groups}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", NAMES, NUMBERS, GROUP)}


def _merged(values: Sequence[Any]) -> Any:
    return whole_of(values) if isinstance(values[0], Tensor) else values[0]


def load_optimizer_state(optimizer: torch.optim.Optimizer, merged: Mapping[str, Any]) -> None:
    """Takes over a merged state dict: options of groups, and this process's parts of the state.

    ValueError for one without names, where a parameter is in none of its groups, or where parameters of one group here
    are in several there.
    """
    if not all(NAMES in group for group in merged["param_groups"]):
        raise ValueError("optimizer_state_dict has groups without param_names; give what merge_state_dicts made")
    state = named_state_dict(optimizer)
    found = {name: group for group in merged["param_groups"] for name in group[NAMES]}
    keys: dict[str, int] = {}
    for group in merged["param_groups"]:
        keys.update(zip(group[NAMES], group["params"], strict=True))
    live = optimizer.inner if isinstance(optimizer, ZeroOptimizer) else optimizer
    entries: dict[int, dict[str, Any]] = {}
    for group, own in zip(state["param_groups"], live.param_groups, strict=True):
        _take_options(group, found)
        for key, name, parameter in zip(group["params"], group[NAMES], own["params"], strict=True):
            values = merged["state"].get(keys[name], {})
            if values:
                entries[key] = {entry: _own_part(name, entry, value, parameter) for entry, value in values.items()}
    live.load_state_dict({"state": entries, "param_groups": state["param_groups"]})


def _take_options(group: dict[str, Any], found: Mapping[str, Mapping[str, Any]]) -> None:
    missing = [name for name in group[NAMES] if name not in found]
    if missing:
        raise ValueError(f"optimizer_state_dict has nothing of parameter {missing[0]!r}; it is of another model")
    sources = {id(found[name]): found[name] for name in group[NAMES]}
    if len(sources) > 1:
        raise ValueError(
            f"parameters of one group, {group[NAMES][:3]}, are in {len(sources)} groups of optimizer_state_dict; "
            "build the optimizer with the same groups"
        )
    for source in sources.values():
        group.update(_options(source))


def _own_part(name: str, entry: str, value: Any, parameter: nn.Parameter) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value.clone() if isinstance(value, Tensor) else value
    if value.shape != parameter.shape:
        raise ValueError(
            f"{entry} of parameter {name!r} has shape {list(value.shape)}, not the parameter's "
            f"{list(parameter.shape)}: which part of it a process needs is not known"
        )
    return part_like(value, parameter)
