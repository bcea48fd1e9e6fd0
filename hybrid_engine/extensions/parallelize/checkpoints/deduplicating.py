"""Checkpoints that hold each tensor once: a process saves what no process before it holds, and sends it to the others.

`broadcast_weights` uses the same groups of copies to send weights from the first unit.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hybrid_engine.distributed.processes import gather_objects, get_rank, get_world_size
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.extensions.parallelize.checkpoints.merging import (
    MODULE,
    OPTIMIZER,
    StateDict,
    check_given,
    extra_states,
    load_extra_states,
    shards_of,
    tensors_of,
)
from hybrid_engine.extensions.parallelize.checkpoints.optimizer_states import NAMES, check_group_names, named_state_dict
from hybrid_engine.extensions.parallelize.lowering.parts import (
    Given,
    check_keys,
    check_same_optimizer,
    check_states,
    check_values,
    local_part,
    place_of,
)
from hybrid_engine.extensions.parallelize.module.parallel_module import ParallelModule
from hybrid_engine.extensions.parallelize.options.values import COUNT, Rule, check, shown
from hybrid_engine.optim import plain_steps
from hybrid_engine.optim.optimizer import ZeroOptimizer


class Copies(NamedTuple):
    """The group of processes along one axis that hold copies of the same tensor or part."""

    group: dist.ProcessGroup | None
    is_first: bool


@torch.no_grad()
def deduped_state_dict(
    module: Any, optimizer: torch.optim.Optimizer | None = None
) -> tuple[StateDict, StateDict | None]:
    """The module's and the optimizer's state on this process that no process before it has; local.

    The results of all processes together are complete: `merge_state_dicts` takes all of them, `load_deduped_state_dict`
    takes each process's own. In the optimizer's state, None stands for a tensor that another process has. Raises
    ValueError if `module` is not a module, and for an optimizer from another source.
    """
    check("module", module, MODULE)
    if optimizer is not None:
        check("optimizer", optimizer, OPTIMIZER)
    with shards_of(module):
        live = tensors_of(module, optimizer)
        copies = {name: list(_copies(module, tensor)) for name, tensor in live.items()}
        state = {name: tensor.detach() for name, tensor in live.items() if all(c.is_first for c in copies[name])}
        state |= {name: part.get_extra_state() for name, part in extra_states(module).items()}
        if optimizer is None:
            return state, None
        optimizer_state = named_state_dict(optimizer)
        entries = {}
        for key, parameter in _parameters(optimizer, optimizer_state):
            is_first = all(c.is_first for c in _copies(module, parameter))
            values = optimizer_state["state"].get(key, {})
            entries[key] = {e: v if is_first or not _is_like(v, parameter) else None for e, v in values.items()}
        return state, {**optimizer_state, "state": entries if any(entries.values()) else {}}


@torch.no_grad()
def load_deduped_state_dict(
    module: Any,
    module_state_dict: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    optimizer_state_dict: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
) -> None:
    """Loads the process's own result of `deduped_state_dict`; other processes send the rest. Collective.

    The module is first moved to `device`. Raises ValueError on all processes, before anything is loaded, if one passes
    what another process, or another plan, saved.
    """
    agree(lambda: check_given(module, module_state_dict, optimizer, optimizer_state_dict, device))
    if device is not None:
        module.to(device)
    with shards_of(module):
        live = tensors_of(module, optimizer)
        agree(lambda: _check_own(module, live, module_state_dict))
        dtypes = {}
        if optimizer is not None and optimizer_state_dict is not None:
            agree(lambda: _check_groups(module, optimizer, optimizer_state_dict))
            dtypes = _dtypes(optimizer_state_dict)
        for name, tensor in live.items():
            if name in module_state_dict:
                local_part(tensor).copy_(local_part(module_state_dict[name]))
            _send(module, tensor, tensor)
        load_extra_states(module, module_state_dict)
        if optimizer is not None and optimizer_state_dict is not None:
            _load_optimizer(module, optimizer, optimizer_state_dict, dtypes)
        if isinstance(optimizer, ZeroOptimizer):
            optimizer.masters.write_back()


def _check_own(module: Any, live: Mapping[str, Tensor], given: Mapping[str, Any]) -> None:
    """Raises ValueError unless `given` has the names and parts that `deduped_state_dict` returns here; local."""
    instead = (
        "give each process what deduped_state_dict gave on it under this plan; merge_state_dicts goes between plans"
    )
    own = {name for name, tensor in live.items() if all(copies.is_first for copies in _copies(module, tensor))}
    for name in sorted(own ^ (given.keys() - extra_states(module).keys())):
        word = "has no" if name in own else "has"
        raise ValueError(f"module_state_dict {word} {name!r}, which this process does not save so; {instead}")
    for name in own:
        _check_part(f"module_state_dict: {name!r}", given[name], live[name], instead)


def _check_part(what: str, given: Any, tensor: Tensor, instead: str) -> None:
    """Raises ValueError unless `given` is the same part of a tensor of the same shape as `tensor` on this process."""
    found, wanted = (place_of(value) if isinstance(value, Tensor) else shown(value) for value in (given, tensor))
    if found != wanted:
        raise ValueError(f"{what} is {found}, and this process has {wanted}; {instead}")
    check_values(what, given, tensor)


def _check_groups(module: Any, optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    """Raises ValueError unless `given` has the optimizer's groups, and states of parts that are held here; local."""
    check_group_names(given["param_groups"], "optimizer_state_dict", "what deduped_state_dict gave")
    check_keys(given, NAMES)
    own_groups = named_state_dict(optimizer)["param_groups"]
    own = [group[NAMES] for group in own_groups]
    saved = [group.get(NAMES) for group in given["param_groups"]]
    if own != saved:
        raise ValueError(
            "optimizer_state_dict has other groups of parameters than the optimizer; merge_state_dicts and "
            "load_merged_state_dicts go between plans"
        )
    for ours, theirs in zip(own_groups, given["param_groups"], strict=True):
        check_same_optimizer(ours, theirs, "options")
    instead = "give each process what deduped_state_dict gave on it"
    _check_all_states(optimizer, given)
    live = optimizer.inner if isinstance(optimizer, ZeroOptimizer) else optimizer
    for key, parameter in _parameters(optimizer, given):
        is_first = all(copies.is_first for copies in _copies(module, parameter))
        for entry, value in given["state"].get(key, {}).items():
            if is_first and value is None:
                raise ValueError(f"optimizer_state_dict: {entry} of parameter {key} is another process's; {instead}")
            is_of_whole = plain_steps.keeps_wholes(live) and not _is_like(value, parameter)
            if is_first and isinstance(value, Tensor) and value.dim() and not is_of_whole:
                _check_part(f"optimizer_state_dict: {entry} of parameter {key}", value, parameter, instead)


def _check_all_states(optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    """Raises ValueError if a parameter lacks entries that others of its group have; local."""
    names = [(number, name) for number, group in enumerate(given["param_groups"]) for name in group[NAMES]]
    found = zip(names, _parameters(optimizer, given), strict=True)
    check_states(
        [Given(name, key, p, given["state"].get(key), number) for (number, name), (key, p) in found],
        parts_elsewhere=True,
    )


def _dtypes(given: Mapping[str, Any]) -> dict[tuple[str, str], torch.dtype]:
    """The dtype of each entry, keyed by parameter name and entry; ValueError if processes disagree; collective."""
    names = {
        name: key for group in given["param_groups"] for name, key in zip(group[NAMES], group["params"], strict=True)
    }
    own = {
        name: {entry: getattr(v, "dtype", None) for entry, v in given["state"].get(k, {}).items()}
        for name, k in names.items()
    }
    instead = "give each process what deduped_state_dict gave on it in the same call"
    first: dict[str, tuple[int, list[str]]] = {}
    dtypes: dict[tuple[str, str], torch.dtype] = {}
    for rank, found in enumerate(gather_objects(own)):
        for name, entries in found.items():
            other, expected = first.setdefault(name, (rank, sorted(entries)))
            if sorted(entries) != expected:
                raise ValueError(
                    f"optimizer_state_dict has {expected} of {name!r} on rank {other} and {sorted(entries)} on rank "
                    f"{rank}; {instead}"
                )
            for entry, dtype in entries.items():
                if dtype is not None and dtypes.setdefault((name, entry), dtype) != dtype:
                    raise ValueError(
                        f"optimizer_state_dict: {entry} of {name!r} has dtype {dtypes[name, entry]} on one process and "
                        f"{dtype} on rank {rank}; {instead}"
                    )
    return dtypes


def _load_optimizer(
    module: Any,
    optimizer: torch.optim.Optimizer,
    given: Mapping[str, Any],
    dtypes: Mapping[tuple[str, str], torch.dtype],
) -> None:
    """Loads a state dict. Tensors that another process has are received in the dtype of `dtypes`; collective."""
    names = [name for group in given["param_groups"] for name in group[NAMES]]
    entries = {}
    for name, (key, parameter) in zip(names, _parameters(optimizer, given), strict=True):
        values = given["state"].get(key, {})
        entries[key] = {
            entry: torch.zeros_like(parameter, dtype=dtypes[name, entry]) if value is None else value
            for entry, value in values.items()
        }
        for value in entries[key].values():
            if _is_like(value, parameter):
                _send(module, parameter, value)
    live = optimizer.inner if isinstance(optimizer, ZeroOptimizer) else optimizer
    live.load_state_dict({**given, "state": {key: values for key, values in entries.items() if values}})


@torch.no_grad()
def broadcast_weights(module: nn.Module, stride: int) -> None:
    """Copies the weights and buffers of the first unit to all units; `stride` is `plan_ngpus`. Collective.

    It is for modules that were built with `init_module_params=rank < plan_ngpus`. Call it before `build_optimizer`,
    which may shard weights over units. Raises ValueError for another stride, for a module without parallel parts, and
    after `build_optimizer` has sharded the module.
    """
    check("module", module, Rule(lambda value: isinstance(value, nn.Module), "a torch.nn.Module"))
    check("stride", stride, COUNT)
    if not _parallel_parts(module):
        raise ValueError("module has no parallel part, and no units; call parallelize before")
    for part in _parallel_parts(module):
        if part.compute_config.plan_ngpus != stride:
            raise ValueError(f"stride={stride} must be plan_ngpus={part.compute_config.plan_ngpus}; pass that")
        if isinstance(part, FSDPModule):
            raise ValueError("broadcast_weights after build_optimizer, which sharded the weights; call it before")
    if get_world_size() == 1:
        return
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_meta:
            continue  # an uninitialized buffer, which forward refuses
        holder = _part_of(module, tensor)
        if holder is None or holder.meshes.data is not None:
            group = None if holder is None or holder.meshes.data is None else holder.meshes.data.get_group()
            dist.broadcast(local_part(tensor.detach()), group_src=0, group=group)


def _parallel_parts(module: nn.Module) -> list[ParallelModule]:
    return [part for part in module.modules() if isinstance(part, ParallelModule)]


def _part_of(module: nn.Module, tensor: Tensor) -> ParallelModule | None:
    """The parallel module that holds the tensor; None for a tensor that every process has."""
    for part in _parallel_parts(module):
        if any(tensor is held for held in [*part.parameters(), *part.buffers()]):
            return part
    return None


def _copies(module: Any, tensor: Tensor) -> Iterator[Copies]:
    """The groups of processes, one per axis, that hold copies of this process's part of a tensor."""
    inner: nn.Module = module.module if hasattr(module, "sharding") else module
    part = _part_of(inner, tensor)
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                yield Copies(mesh.get_group(axis), mesh.get_local_rank(axis) == 0)
    elif part is None:
        yield Copies(None, get_rank() == 0)
    elif part.meshes.unit is not None:
        unit = part.meshes.unit
        yield from (Copies(unit.get_group(axis), unit.get_local_rank(axis) == 0) for axis in range(unit.ndim))
    # ZeRO does not shard parameters without a dimension.
    is_over_units = isinstance(part, FSDPModule) and isinstance(tensor, DTensor) and tensor.dim() > 0
    if part is not None and part.meshes.data is not None and not is_over_units:
        yield Copies(part.meshes.data.get_group(), part.meshes.data.get_local_rank() == 0)


def _send(module: Any, parameter: Tensor, value: Tensor) -> None:
    """Sends `value`, which has the layout of `parameter`, to all processes that hold copies of it."""
    for copies in _copies(module, parameter):
        if copies.group is not None or get_world_size() > 1:
            dist.broadcast(local_part(value.detach()), group_src=0, group=copies.group)


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _parameters(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Iterator[tuple[int, nn.Parameter]]:
    """Pairs of a parameter's key in a state dict and the parameter."""
    live = optimizer.inner if isinstance(optimizer, ZeroOptimizer) else optimizer
    for group, own in zip(state["param_groups"], live.param_groups, strict=True):
        yield from zip(group["params"], own["params"], strict=True)
