"""Full checkpoints: one state dict from those of all processes, and from one what each process needs of it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.parallel.checkpoints.optimizer_states import load_optimizer_state, merge_optimizer_states
from hybrid_engine.parallel.checkpoints.parts import part_like, whole_of

StateDict = dict[str, Any]


def merge_state_dicts(
    module_state_dicts: Sequence[Mapping[str, Any]], optimizer_state_dicts: Sequence[Mapping[str, Any]] | None = None
) -> tuple[StateDict, StateDict | None]:
    """The whole state dicts of the original module and of its optimizer, from all processes'; local.

    What `state_dict()` or `deduped_state_dict` gave on each process, also in files, in any order. Tensors are on the
    CPU. The optimizer's loads into one of the original module with the same groups. ValueError where parts are missing.
    """
    parts: dict[str, list[Any]] = {}
    for state in module_state_dicts:
        for name, value in state.items():
            parts.setdefault(name, []).append(value)
    merged = {name: whole_of(values) if isinstance(values[0], Tensor) else values[0] for name, values in parts.items()}
    return merged, None if optimizer_state_dicts is None else merge_optimizer_states(optimizer_state_dicts)


@torch.no_grad()
def load_merged_state_dicts(
    module: Any,
    module_state_dict: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    optimizer_state_dict: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
) -> None:
    """Loads whole state dicts into a module under any plan, or an engine; each process takes its part.

    `module` holds parallel modules, or is what `initialize` gave; `device` is where the module is moved before.
    ValueError where a name is missing or a shape is another.
    """
    check_pair(optimizer, optimizer_state_dict)
    if device is not None:
        module.to(device)
    with shards_of(module):
        live = tensors_of(module, optimizer)
        missing = [name for name in live if name not in module_state_dict]
        if missing:
            raise ValueError(f"module_state_dict has no {missing[0]!r}; it is of another model")
        for name, tensor in live.items():
            _check_shape(name, module_state_dict[name], tensor)
        for name, tensor in live.items():
            _load(module, name, tensor, module_state_dict[name])
        if optimizer is not None and optimizer_state_dict is not None:
            load_optimizer_state(optimizer, optimizer_state_dict)
        if isinstance(optimizer, ZeroOptimizer):
            optimizer.masters.write_back()


def check_pair(optimizer: torch.optim.Optimizer | None, optimizer_state_dict: Mapping[str, Any] | None) -> None:
    """ValueError where one of the two is given without the other."""
    if (optimizer is None) != (optimizer_state_dict is None):
        raise ValueError("optimizer and optimizer_state_dict go together; give both, or neither")


@contextmanager
def shards_of(module: Any) -> Iterator[None]:
    """An engine's parameters are shards inside, as its optimizer has them; a module's are in any case."""
    with module.sharding.as_shards() if hasattr(module, "sharding") else nullcontext():
        yield


def tensors_of(module: Any, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """The tensors of a state dict by name, with the optimizer's masters in the place of parameters."""
    inner: nn.Module = module.module if hasattr(module, "sharding") else module
    tensors = {name: value for name, value in inner.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    if isinstance(optimizer, ZeroOptimizer):
        masters = {id(t.param): t.master for t in optimizer.parameters}
        tensors = {name: masters.get(id(tensor), tensor) for name, tensor in tensors.items()}
    return tensors


def _check_shape(name: str, given: Tensor, tensor: Tensor) -> None:
    if given.shape != tensor.shape:
        raise ValueError(
            f"{name!r} has shape {list(given.shape)} in module_state_dict and {list(tensor.shape)} in the module"
        )


def _load(module: nn.Module, name: str, tensor: Tensor, whole: Tensor) -> None:
    if not tensor.is_meta:
        tensor.copy_(part_like(whole, tensor))
        return
    path, _, last = name.rpartition(".")
    module.get_submodule(path)._buffers[last] = whole.clone()  # never initialised; parameters always are
