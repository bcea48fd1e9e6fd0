"""States of optimizers by parameter names, merged and loaded, with the checks of saved tensors and their parts.

`checkpoints.py` uses this for `merge_state_dicts` and the functions that load its results.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard

from hybrid_engine.extensions.parallelize.graph.compute_config import is_number, shown
from hybrid_engine.optim.masters import keeps_wholes
from hybrid_engine.optim.optimizer import ZeroOptimizer

NAMES, NUMBERS, GROUP = "param_names", "param_numbers", "group_number"
"""Entries that `build_optimizer` adds to groups: parameter names, their positions, the user's group number."""
COUNTERS = ("step", "eta", "mu", "mu_product")
"""Entries that torch's optimizers keep as one number per parameter, whatever its size."""
WHAT = "optimizer_state_dict"
HOW_WITHOUT = "give what was saved; of one that was never stepped the state is {}"


@dataclass
class MergedGroup:
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
    groups: dict[int, MergedGroup] = {}
    found: dict[str, dict[str, list[Any]]] = {}
    for state in states:
        for position, group in enumerate(state["param_groups"]):
            merged = groups.setdefault(group.get(GROUP, position), MergedGroup(_options(group)))
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
                _check_state(name, entry, value, parameter, keeps_wholes(live))
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


# Lets `torch.load` read each rank's own `state_dict()` under torch 2.11; 2.12 and later do not need it.
torch.serialization.add_safe_globals([_StridedShard])


def extent(
    shape: Sequence[int], sizes: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[slice, ...]:
    """The position of the part of the process at `coordinate` of a mesh of `sizes`, in a tensor of `shape`.

    The axes of the plan divide the tensor first, from left to right. FSDP2 then divides those parts, which DTensor
    calls strided.
    """
    ranges = [(0, size) for size in shape]
    sharded = [axis for axis, placement in enumerate(placements) if hasattr(placement, "dim")]
    for axis in sorted(sharded, key=lambda axis: hasattr(placements[axis], "split_factor")):
        dim = placements[axis].dim  # type: ignore[attr-defined]
        start, stop = ranges[dim]
        length = -(-(stop - start) // sizes[axis])
        ranges[dim] = tuple(min(start + length * number, stop) for number in (coordinate[axis], coordinate[axis] + 1))
    return tuple(slice(*bounds) for bounds in ranges)


def extent_of(tensor: DTensor) -> tuple[slice, ...]:
    """The position of this process's part of a sharded tensor in the whole, also for a tensor loaded from a file."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, f"{mesh=} without this process"
    return extent(tensor.shape, mesh.shape, coordinate, tensor.placements)


def place_of(tensor: Tensor) -> str:
    """A description of a tensor's shape and of the part that this process holds."""
    if not isinstance(tensor, DTensor):
        return f"all of {list(tensor.shape)}"
    ranges = ", ".join(f"{part.start}:{part.stop}" for part in extent_of(tensor))
    return f"[{ranges}] of {list(tensor.shape)}"


def kind_of(dtype: torch.dtype) -> str:
    """The kind of numbers of a dtype."""
    if dtype == torch.bool:
        return "logical"
    return "complex" if dtype.is_complex else "floating-point" if dtype.is_floating_point else "whole"


def check_values(what: str, given: Tensor, live: Tensor) -> None:
    """Raises ValueError unless `given` is dense with numbers of `live`'s kind; others would be lost or rounded."""
    if given.is_meta or given.layout is not torch.strided:
        raise ValueError(f"{what} must be a dense tensor with values, not one on {given.device} of {given.layout}")
    if kind_of(given.dtype) != kind_of(live.dtype):
        raise ValueError(
            f"{what} has dtype {given.dtype} and the module has {live.dtype}: {kind_of(given.dtype)} numbers are not "
            f"{kind_of(live.dtype)} ones; give what was saved, or convert it before"
        )


def whole_of(parts: Iterable[Any]) -> Tensor:
    """The whole tensor, on the CPU, from the parts of all processes; a tensor that is not a DTensor is already whole.

    Raises ValueError if a part is missing, or if the parts have different shapes or dtypes.
    """
    listed = list(parts)
    for part in listed:
        if not isinstance(part, Tensor):
            raise ValueError(f"a process has {shown(part)} in the place of a tensor; they are of two models")
        if (part.shape, part.dtype) != (listed[0].shape, listed[0].dtype):
            found = [f"{one.dtype} of shape {list(one.shape)}" for one in (listed[0], part)]
            raise ValueError(f"parts are {found[0]} and {found[1]}; they are of two models")
    whole = next((part for part in listed if not isinstance(part, DTensor)), None)
    if whole is not None:
        return whole.detach().cpu().clone()
    whole = torch.empty(listed[0].shape, dtype=listed[0].dtype)
    covered = torch.zeros(whole.shape, dtype=torch.bool)
    for part in listed:
        where = extent_of(part)
        whole[where] = part.to_local().detach().cpu()
        covered[where] = True
    if not covered.all():
        raise ValueError("a process's part of a tensor is missing; give the state dicts of all processes")
    return whole


def part_like(whole: Tensor, like: Tensor) -> Tensor:
    """The part of `whole` that this process holds of `like`, sharded in the same way; both have the same shape."""
    if not isinstance(like, DTensor):
        return whole.to(like.device, copy=True)
    local = whole[extent_of(like)].to(like.device, copy=True).contiguous()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


class Given(NamedTuple):
    """The entry of one parameter in a state dict."""

    name: str
    key: Any
    """Key of the parameter in `state`."""
    parameter: Tensor
    entries: Mapping[str, Any] | None
    """None: there is no entry, not even an empty dict."""
    group: Hashable
    """Parameters of one group with the same number of dimensions must have the same entries."""


def check_keys(state: Mapping[str, Any], names: str) -> None:
    """Raises ValueError if `state` has parameters that no group has, or if groups list a parameter twice."""
    keys = [key for group in state["param_groups"] for key in group["params"]]
    listed = [name for group in state["param_groups"] for name in group[names]]
    for found in (keys, listed):
        twice = next((one for one in found if found.count(one) > 1), None) if len(set(found)) < len(found) else None
        if twice is not None:
            raise ValueError(f"{WHAT}: parameter {twice!r} is in its groups twice; give what was saved")
    unknown = [key for key in state["state"] if key not in set(keys)]
    if unknown:
        raise ValueError(f"{WHAT}: state has {unknown[0]!r}, which is in none of its groups; give what was saved")


def check_states(found: Iterable[Given], *, parts_elsewhere: bool) -> None:
    """Raises ValueError if a parameter lacks an entry that the others have, or has one of another kind.

    With `parts_elsewhere`, None stands for a tensor that another process has.
    """
    listed = list(found)
    has_any = any(given.entries for given in listed)
    first: dict[Hashable, tuple[str, dict[str, str | None]]] = {}
    for given in listed:
        if given.entries is None and has_any:
            raise ValueError(f"{WHAT} has no state of {given.name!r}, state[{given.key!r}]; {HOW_WITHOUT}")
        if not given.entries:
            continue
        forms = {
            entry: None if value is None and parts_elsewhere else _form(given, entry, value)
            for entry, value in given.entries.items()
        }
        other, expected = first.setdefault((given.group, given.parameter.dim()), (given.name, forms))
        if forms.keys() != expected.keys():
            raise ValueError(
                f"{WHAT} has {sorted(expected)} of {other!r} and {sorted(forms)} of {given.name!r}, which are of one "
                f"group; {HOW_WITHOUT}"
            )
        for entry, form in forms.items():
            if None not in (form, expected[entry]) and form != expected[entry]:
                raise ValueError(
                    f"{WHAT}: {entry} is {expected[entry]} of {other!r} and {form} of {given.name!r}, which are of one "
                    "group; give what was saved"
                )


def _form(given: Given, entry: str, value: Any) -> str:
    if isinstance(value, Tensor):
        kind = kind_of(value.dtype)
        if kind == "complex" and kind_of(given.parameter.dtype) != kind:
            raise ValueError(
                f"{WHAT}: {entry} of {given.name!r} is complex, and the parameter is not; give what was saved of it"
            )
        return f"a tensor of {kind} numbers" if value.dim() else "one number"
    return "one number" if is_number(value) else shown(value)


def check_same_optimizer(ours: Mapping[str, Any], theirs: Mapping[str, Any], what: str) -> None:
    """Raises ValueError if an optimizer and a saved one each have options or states that the other lacks.

    If only one of them has more, it is accepted: versions of an optimizer add some, and users add their own.
    """
    of_schedulers = {"initial_lr"}
    here = sorted(ours.keys() - theirs.keys() - of_schedulers)
    there = sorted(theirs.keys() - ours.keys() - of_schedulers)
    if here and there:
        raise ValueError(
            f"{WHAT} is of another optimizer: it has {what} {there}, and this one has {here} instead; build the same"
        )
