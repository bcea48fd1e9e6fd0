"""Full checkpoints: merges the state dicts of all processes into one, and loads its parts into any plan or engine."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybrid_engine.distributed.verdict import agree
from hybrid_engine.extensions.parallelize.checkpoints.optimizer_states import (
    check_merged_state,
    load_optimizer_state,
    merge_optimizer_states,
)
from hybrid_engine.extensions.parallelize.lowering.parts import check_values, part_like, whole_of
from hybrid_engine.extensions.parallelize.module.held_module import has_extra_state
from hybrid_engine.extensions.parallelize.module.parallel_module import ParallelModule
from hybrid_engine.extensions.parallelize.options.values import Rule, check, has_names, is_list_of, shown
from hybrid_engine.optim.optimizer import ZeroOptimizer

StateDict = dict[str, Any]


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


MODULE = Rule(lambda value: isinstance(value, nn.Module) or hasattr(value, "sharding"), "a module, or an engine")
STATE_DICT = Rule(has_names, "a state dict of a module")
OPTIMIZER = Rule(
    lambda value: isinstance(value, torch.optim.Optimizer), "an optimizer of build_optimizer or initialize"
)
OPTIMIZER_STATE_DICT = Rule(_is_optimizer_state, "a state dict of an optimizer, with 'state' and 'param_groups'")
STATE_DICTS = Rule(
    lambda value: is_list_of(value, has_names) and len(value) > 0, "a list of the modules' state dicts of all processes"
)
OPTIMIZER_STATE_DICTS = Rule(
    lambda value: is_list_of(value, _is_optimizer_state) and len(value) > 0,
    "a list of the optimizers' state dicts of all processes, each with 'state' and 'param_groups'",
)
DEVICE = Rule(_is_device, "a device of torch, as 'cpu' or 'cuda:0'")


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
