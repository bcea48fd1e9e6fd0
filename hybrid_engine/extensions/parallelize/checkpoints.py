"""Checkpoints between any two plans: state dicts merged into whole ones, and those that hold each tensor once.

`broadcast_weights` uses the same groups of copies to send weights from the first unit.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hybrid_engine.distributed.processes import gather_objects, get_rank, get_world_size
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.extensions.parallelize.graph.compute_config import (
    COUNT,
    ValueRule,
    check,
    has_names,
    is_list_of,
    shown,
)
from hybrid_engine.extensions.parallelize.module.held_module import has_extra_state, local_part
from hybrid_engine.extensions.parallelize.module.parallel_module import ParallelModule
from hybrid_engine.extensions.parallelize.optimizer_states import (
    NAMES,
    Given,
    check_group_names,
    check_keys,
    check_merged_state,
    check_same_optimizer,
    check_states,
    check_values,
    load_optimizer_state,
    merge_optimizer_states,
    named_state_dict,
    part_like,
    place_of,
    whole_of,
)
from hybrid_engine.optim.masters import keeps_wholes
from hybrid_engine.optim.optimizer import ZeroOptimizer

StateDict = dict[str, Any]
MODULE = ValueRule(lambda value: isinstance(value, nn.Module) or hasattr(value, "sharding"), "a module, or an engine")
STATE_DICT = ValueRule(has_names, "a state dict of a module")
OPTIMIZER = ValueRule(
    lambda value: isinstance(value, torch.optim.Optimizer), "an optimizer of build_optimizer or initialize"
)
STATE_DICTS = ValueRule(
    lambda value: is_list_of(value, has_names) and len(value) > 0, "a list of the modules' state dicts of all processes"
)
OPTIMIZER_STATE_DICTS = ValueRule(
    lambda value: is_list_of(value, _is_optimizer_state) and len(value) > 0,
    "a list of the optimizers' state dicts of all processes, each with 'state' and 'param_groups'",
)


def merge_state_dicts(
    module_state_dicts: Sequence[Mapping[str, Any]], optimizer_state_dicts: Sequence[Mapping[str, Any]] | None = None
) -> tuple[StateDict, StateDict | None]:
    """The whole state dicts of the original module and of its optimizer, from those of all processes; local.

    Each entry is what `state_dict()` or `deduped_state_dict` returned on one process, possibly loaded from a file, in
    any order. The merged tensors are on the CPU. The optimizer's state loads into an optimizer of the original module's
    trained parameters with the same groups. Raises ValueError if parts are missing.
    """
    check("module_state_dicts", module_state_dicts, STATE_DICTS)
    if optimizer_state_dicts is not None:
        check("optimizer_state_dicts", optimizer_state_dicts, OPTIMIZER_STATE_DICTS)
        if len(optimizer_state_dicts) != len(module_state_dicts):
            raise ValueError(
                f"optimizer_state_dicts are {len(optimizer_state_dicts)}, module_state_dicts "
                f"{len(module_state_dicts)}; give both of all processes"
            )
    parts: dict[str, list[Any]] = {}
    for state in module_state_dicts:
        for name, value in state.items():
            parts.setdefault(name, []).append(value)
    merged = {
        name: _whole(name, values) if isinstance(values[0], Tensor) else values[0] for name, values in parts.items()
    }
    return merged, None if optimizer_state_dicts is None else merge_optimizer_states(optimizer_state_dicts)


def _whole(name: str, parts: Sequence[Any]) -> Tensor:
    try:
        return whole_of(parts)
    except ValueError as error:
        raise ValueError(f"module_state_dicts: {name}: {error}") from error


@torch.no_grad()
def load_merged_state_dicts(
    module: Any,
    module_state_dict: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    optimizer_state_dict: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
) -> None:
    """Loads whole state dicts into a module under any plan, or into an engine; each process takes its part.

    `module` contains parallel modules, or is the result of `initialize`. It is first moved to `device`. Collective.
    Raises ValueError on all processes if a name is missing or unknown, if a shape or kind of numbers differs, or if the
    state of a parameter is missing; nothing is loaded then.
    """
    agree(lambda: check_given(module, module_state_dict, optimizer, optimizer_state_dict, device))
    if device is not None:
        module.to(device)
    with shards_of(module):
        live = tensors_of(module, optimizer)
        agree(lambda: _check_merged(module, live, module_state_dict, optimizer, optimizer_state_dict))
        for name, tensor in live.items():
            _load(module, name, tensor, module_state_dict[name])
        load_extra_states(module, module_state_dict)
        if optimizer is not None and optimizer_state_dict is not None:
            load_optimizer_state(optimizer, optimizer_state_dict)
        if isinstance(optimizer, ZeroOptimizer):
            optimizer.masters.write_back()


def check_given(
    module: Any,
    module_state_dict: Any,
    optimizer: Any,
    optimizer_state_dict: Any,
    device: torch.device | str | None,
) -> None:
    """Raises ValueError for an argument of the wrong type, and for an optimizer or its state dict without the other."""
    check("module", module, MODULE)
    check("module_state_dict", module_state_dict, STATE_DICT)
    if (optimizer is None) != (optimizer_state_dict is None):
        raise ValueError("optimizer and optimizer_state_dict go together; give both, or neither")
    if optimizer is not None:
        check("optimizer", optimizer, OPTIMIZER)
        check("optimizer_state_dict", optimizer_state_dict, OPTIMIZER_STATE_DICT)
    if device is not None:
        check("device", device, DEVICE)


def _is_device(value: Any) -> bool:
    try:
        return isinstance(value, str | torch.device) and bool(torch.device(value))
    except RuntimeError:
        return False


def _is_optimizer_state(value: Any) -> bool:
    if not has_names(value) or not {"state", "param_groups"} <= set(value) or not isinstance(value["state"], Mapping):
        return False
    if not all(has_names(entries) for entries in value["state"].values()):
        return False
    return is_list_of(value["param_groups"], lambda group: has_names(group) and isinstance(group.get("params"), list))


OPTIMIZER_STATE_DICT = ValueRule(_is_optimizer_state, "a state dict of an optimizer, with 'state' and 'param_groups'")


DEVICE = ValueRule(_is_device, "a device of torch, as 'cpu' or 'cuda:0'")


@contextmanager
def shards_of(module: Any) -> Iterator[None]:
    """Context in which an engine's parameters are shards, as its optimizer has them; other modules are unchanged."""
    with module.sharding.as_shards() if hasattr(module, "sharding") else nullcontext():
        yield


def tensors_of(module: Any, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """The tensors of a state dict by name; the optimizer's master weights replace parameters."""
    inner: nn.Module = module.module if hasattr(module, "sharding") else module
    others = extra_states(module)
    state = inner.state_dict(keep_vars=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and name not in others}
    if isinstance(optimizer, ZeroOptimizer):
        masters = {id(t.param): t.master for t in optimizer.parameters}
        tensors = {name: masters.get(id(tensor), tensor) for name, tensor in tensors.items()}
    return tensors


def extra_states(module: Any) -> dict[str, nn.Module]:
    """Modules with state in addition to tensors (`get_extra_state`), by their names in a state dict."""
    inner: nn.Module = module.module if hasattr(module, "sharding") else module
    found = {f"{path}._extra_state".removeprefix("."): part for path, part in inner.named_modules()}
    return {name: part for name, part in found.items() if has_extra_state(part)}


def load_extra_states(module: Any, given: Mapping[str, Any]) -> None:
    """Sets the extra states that `given` has; checkpoints of earlier releases do not have them."""
    for name, part in extra_states(module).items():
        if name in given:
            part.set_extra_state(given[name])


def _check_merged(
    module: Any,
    live: Mapping[str, Tensor],
    given: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None,
    optimizer_state: Mapping[str, Any] | None,
) -> None:
    """Raises ValueError unless the checkpoint is whole. A stage needs only a part of it. Local."""
    inner: nn.Module = module.module if hasattr(module, "sharding") else module
    has_all = not any(isinstance(part, ParallelModule) and part.plan.stages for part in inner.modules())
    missing = [name for name in live if name not in given]
    if missing:
        raise ValueError(f"module_state_dict has no {missing[0]!r}; it is of another model")
    known = inner.state_dict().keys() if has_all else given.keys()
    if more := [name for name in given if name not in known]:
        raise ValueError(f"module_state_dict has {more[0]!r}, which the module lacks; it is of another model")
    for name, tensor in live.items():
        _check_whole(name, given[name], tensor)
    if optimizer is not None and optimizer_state is not None:
        check_merged_state(optimizer, optimizer_state, () if has_all else given.keys())


def _check_whole(name: str, given: Any, tensor: Tensor) -> None:
    if not isinstance(given, Tensor):
        raise ValueError(f"module_state_dict has {shown(given)} for {name!r}; it must be a tensor")
    if isinstance(given, DTensor):
        raise ValueError(f"module_state_dict has a part of {name!r}; give what merge_state_dicts made of all parts")
    if given.shape != tensor.shape:
        raise ValueError(
            f"{name!r} has shape {list(given.shape)} in module_state_dict and {list(tensor.shape)} in the module"
        )
    check_values(f"module_state_dict: {name!r}", given, tensor)


def _load(module: nn.Module, name: str, tensor: Tensor, whole: Tensor) -> None:
    if not tensor.is_meta:
        tensor.copy_(part_like(whole, tensor))
        return
    path, _, last = name.rpartition(".")
    module.get_submodule(path)._buffers[last] = whole.clone()  # a buffer on meta; parameters are always initialized


class CopyGroup(NamedTuple):
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
            is_of_whole = keeps_wholes(live) and not _is_like(value, parameter)
            if is_first and isinstance(value, Tensor) and value.dim() and not is_of_whole:
                _check_part(f"optimizer_state_dict: {entry} of parameter {key}", value, parameter, instead)


def _check_all_states(optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
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
    check("module", module, ValueRule(lambda value: isinstance(value, nn.Module), "a torch.nn.Module"))
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


def _copies(module: Any, tensor: Tensor) -> Iterator[CopyGroup]:
    """The groups of processes, one per axis, that hold copies of this process's part of a tensor."""
    inner: nn.Module = module.module if hasattr(module, "sharding") else module
    part = _part_of(inner, tensor)
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                yield CopyGroup(mesh.get_group(axis), mesh.get_local_rank(axis) == 0)
    elif part is None:
        yield CopyGroup(None, get_rank() == 0)
    elif part.meshes.unit is not None:
        unit = part.meshes.unit
        yield from (CopyGroup(unit.get_group(axis), unit.get_local_rank(axis) == 0) for axis in range(unit.ndim))
    # ZeRO does not shard parameters without a dimension.
    is_over_units = isinstance(part, FSDPModule) and isinstance(tensor, DTensor) and tensor.dim() > 0
    if part is not None and part.meshes.data is not None and not is_over_units:
        yield CopyGroup(part.meshes.data.get_group(), part.meshes.data.get_local_rank() == 0)


def _send(module: Any, parameter: Tensor, value: Tensor) -> None:
    """Sends `value`, which has the layout of `parameter`, to all processes that hold copies of it."""
    for copies in _copies(module, parameter):
        if copies.group is not None or get_world_size() > 1:
            dist.broadcast(local_part(value.detach()), group_src=0, group=copies.group)


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _parameters(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Iterator[tuple[int, nn.Parameter]]:
    live = optimizer.inner if isinstance(optimizer, ZeroOptimizer) else optimizer
    for group, own in zip(state["param_groups"], live.param_groups, strict=True):
        yield from zip(group["params"], own["params"], strict=True)
