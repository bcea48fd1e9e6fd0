"""Conversion of an optimizer's state to one keyed by parameter names, and loading of it into another optimizer.

`merging.py` and `deduplicating.py` use this.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybrid_engine.extensions.parallelize.lowering.parts import (
    Given,
    check_keys,
    check_same_optimizer,
    check_states,
    part_like,
    whole_of,
)
from hybrid_engine.optim import plain_steps
from hybrid_engine.optim.optimizer import ZeroOptimizer

NAMES, NUMBERS, GROUP = "param_names", "param_numbers", "group_number"
"""Entries that `build_optimizer` adds to groups: parameter names, their positions, the user's group number."""
COUNTERS = ("step", "eta", "mu", "mu_product")
"""Entries that torch's optimizers keep as one number per parameter, whatever its size."""


@dataclass
class Group:
    """A parameter group as the user passed it."""

    options: dict[str, Any]
    numbers: dict[str, int] = field(default_factory=dict)
    """Maps the name of each parameter of the group to its position in the module."""

    @property
    def names(self) -> list[str]:
        """The group's parameter names, in the module's order."""
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

    Its groups have `param_names`, and their parameters are in the module's order. Raises ValueError for groups without
    names.
    """
    for state in states:
        check_group_names(state["param_groups"], "optimizer_state_dicts", "what optimizers of build_optimizer gave")
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
        key: {entry: _merged(name, entry, values) for entry, values in found.get(name, {}).items()}
        for name, key in numbered.items()
        if found  # an unstepped optimizer then has an empty state, a lost one none
    }
    return {"state": merged_state, "param_groups": merged_groups}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", NAMES, NUMBERS, GROUP)}


def _merged(name: str, entry: str, values: Sequence[Any]) -> Any:
    if entry == "step" and len(moments := sorted({float(value) for value in values})) > 1:
        raise ValueError(
            f"optimizer_state_dicts: {name} is after {moments[0]:g} steps in one of them and after {moments[-1]:g} in "
            "another; give those that all processes saved at once"
        )
    try:
        return whole_of(values) if isinstance(values[0], Tensor) else values[0]
    except ValueError as error:
        raise ValueError(f"optimizer_state_dicts: {entry} of {name}: {error}") from error


def check_group_names(groups: Sequence[Mapping[str, Any]], option: str, instead: str) -> None:
    """Raises ValueError unless each group names each parameter once, and has a position per name or none."""
    for number, group in enumerate(groups):
        names = group.get(NAMES)
        if not isinstance(names, list | tuple):
            raise ValueError(f"{option} has groups without param_names, as number {number}; give {instead}")
        if len(names) != len(group["params"]):
            raise ValueError(
                f"{option}: group {number} has {len(names)} param_names for {len(group['params'])} params; give "
                f"{instead}"
            )
        if len(group.get(NUMBERS, names)) != len(names):
            raise ValueError(
                f"{option}: group {number} has {len(group[NUMBERS])} {NUMBERS} for {len(names)} {NAMES}; give {instead}"
            )


def check_merged_state(optimizer: torch.optim.Optimizer, merged: Mapping[str, Any], elsewhere: Collection[str]) -> None:
    """Raises ValueError for a state dict without names, one that is not whole, or one of another optimizer or model.

    Also raises it if a parameter is in none of its groups, or if parameters of one group here are in several groups
    there. `elsewhere` holds names of parameters that other processes may train.
    """
    check_group_names(merged["param_groups"], "optimizer_state_dict", "what merge_state_dicts made")
    check_keys(merged, NAMES)
    found = {name: group for group in merged["param_groups"] for name in group[NAMES]}
    keys, live, own = _keys_by_name(merged), _live(optimizer), named_state_dict(optimizer)["param_groups"]
    trained = {name for group in own for name in group[NAMES]}
    if more := [name for name in found if name not in trained and name not in elsewhere]:
        raise ValueError(
            f"optimizer_state_dict has parameter {more[0]!r}, which this optimizer does not train; build it for the "
            "parameters that were trained"
        )
    listed = []
    for group, live_group in zip(own, live.param_groups, strict=True):
        source = _source_of(group, found, merged["param_groups"])
        check_same_optimizer(_options(group), _options(source), "options")
        for name, parameter in zip(group[NAMES], live_group["params"], strict=True):
            entries = merged["state"].get(keys[name])
            listed.append(Given(name, keys[name], parameter, entries, id(source)))
            for entry, value in (entries or {}).items():
                _check_state(name, entry, value, parameter, plain_steps.keeps_wholes(live))
            if entries and live.state.get(parameter):
                check_same_optimizer(live.state[parameter], entries, "states")
    check_states(listed, parts_elsewhere=False)


def _keys_by_name(merged: Mapping[str, Any]) -> dict[str, int]:
    return {
        name: key for group in merged["param_groups"] for name, key in zip(group[NAMES], group["params"], strict=True)
    }


def _live(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.inner if isinstance(optimizer, ZeroOptimizer) else optimizer


def load_optimizer_state(optimizer: torch.optim.Optimizer, merged: Mapping[str, Any]) -> None:
    """Loads a merged state dict that `check_merged_state` accepted: options of groups, and this process's parts."""
    state, live, keys = named_state_dict(optimizer), _live(optimizer), _keys_by_name(merged)
    found = {name: group for group in merged["param_groups"] for name in group[NAMES]}
    lies_as_parameters = _entries_like_parameters(merged["state"])
    entries: dict[int, dict[str, Any]] = {}
    for group, own in zip(state["param_groups"], live.param_groups, strict=True):
        group.update(_options(_source_of(group, found, merged["param_groups"])))
        for key, name, parameter in zip(group["params"], group[NAMES], own["params"], strict=True):
            values = merged["state"].get(keys[name], {})
            if values:
                entries[key] = {
                    entry: _own_part(value, parameter, lies_as_parameters(entry)) for entry, value in values.items()
                }
    live.load_state_dict({"state": entries, "param_groups": state["param_groups"]})


def _source_of(
    group: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """The group of the state dict that has the parameters of `group`; `found` maps their names to groups.

    For a group that is empty on this process it is the one with the same number, if there is one.
    """
    if not group[NAMES]:
        return next(iter(groups[group[GROUP] : group[GROUP] + 1]), {}) if GROUP in group else {}
    missing = [name for name in group[NAMES] if name not in found]
    if missing:
        raise ValueError(f"optimizer_state_dict has nothing of parameter {missing[0]!r}; it is of another model")
    sources = {id(found[name]): found[name] for name in group[NAMES]}
    if len(sources) > 1:
        raise ValueError(
            f"parameters of one group, {group[NAMES][:3]}, are in {len(sources)} groups of optimizer_state_dict; "
            "build the optimizer with the same groups"
        )
    return next(iter(sources.values()))


def _check_state(name: str, entry: str, value: Any, parameter: nn.Parameter, has_other_shapes: bool) -> None:
    if isinstance(value, DTensor):
        raise ValueError(
            f"optimizer_state_dict has a part of {entry} of {name!r}; give what merge_state_dicts made of all parts"
        )
    if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape and not has_other_shapes:
        raise ValueError(
            f"{entry} of parameter {name!r} has shape {list(value.shape)}, not the parameter's "
            f"{list(parameter.shape)}: which part of it a process needs is not known"
        )


def _entries_like_parameters(state: Mapping[Any, Mapping[str, Any]]) -> Callable[[str], bool]:
    """A function that says whether an entry has one number for each element of a parameter, or one for the parameter.

    For a parameter without a dimension the two look alike; the entries of other parameters decide.
    """
    sized = {e for entries in state.values() for e, v in entries.items() if isinstance(v, Tensor) and v.dim()}
    return lambda entry: entry in sized if sized else entry not in COUNTERS


def _own_part(value: Any, parameter: nn.Parameter, lies_as_parameters: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    is_divided = value.shape == parameter.shape and (parameter.dim() > 0 or lies_as_parameters)
    return part_like(value, parameter) if is_divided else value.clone()
