"""Checkpoints of a ZeroEngine: everything needed to go on as if the run had never stopped.

Tensors are stored by parameter name with `torch.distributed.checkpoint`, which reads them back on another number of
processes and at another ZeRO stage. A trained bf16 or fp16 parameter is stored as its fp32 master only: the parameter
is the master, rounded. The rest (counters, scheduler, loss scale, random states, ...) is `state.pt`, read without
running pickled code. How the files reach their place is in `checkpoint_folder.py`.
"""

import io
import os
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from hybrid_engine import checkpoint_folder
from hybrid_engine.checkpoint_checks import FORMAT, check_manifest
from hybrid_engine.random_state import get_random_state, set_random_state
from hybrid_engine.zero.optimizer import ZeroOptimizer
from hybrid_engine.zero.processes import gather_objects, on_rank_zero

if TYPE_CHECKING:
    from hybrid_engine.engine import ZeroEngine

STATE_FILE = "state.pt"
StoredTensors = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes by key."""
COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def save(
    engine: "ZeroEngine",
    directory: str | os.PathLike[str],
    tag: str | int | None,
    client_state: Any,
    is_latest: bool = True,
    without_frozen: bool = False,
) -> Path:
    """Writes the checkpoint `tag` (default `global_step<n>`) and makes it the latest if asked to; collective.

    When it returns, the checkpoint is on disk; until then an older one of the same tag stays. The client state is
    rank 0's. `without_frozen` leaves parameters out that require no gradient, such as the base of adapters: an engine
    that loads it keeps its own.

    Raises:
        ValueError: in the middle of an accumulation; a tag that is no folder name; a client state that is not made of
            plain values and tensors.
    """
    folder, tag = Path(directory), str(tag) if tag is not None else f"global_step{engine.global_steps}"
    checkpoint_folder.check_tag(tag)
    _check_at_boundary(engine)
    state = {**_collect_state(engine), "client_state": client_state}
    serialized = on_rank_zero(lambda: _serialize(state))
    left_out = _frozen_names(engine) if without_frozen else set()
    writing = on_rank_zero(lambda: checkpoint_folder.begin(folder, tag))
    with _without_process_group_warning(), engine.sharding.as_shards():
        if engine.optimizer is not None:
            engine.optimizer.renew_masters()
        tensors = {
            key: t for key, t in _collect_tensors(engine).items() if key.removeprefix("weights.") not in left_out
        }
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(writing), no_dist=_is_alone(engine))

    def finish() -> None:
        (writing / STATE_FILE).write_bytes(serialized)
        checkpoint_folder.publish(writing, folder, tag, _build_manifest(engine, left_out), is_latest)

    on_rank_zero(finish)
    return folder / tag


def load(
    engine: "ZeroEngine",
    directory: str | os.PathLike[str],
    tag: str | int | None,
    *,
    module_only: bool = False,
    with_scheduler: bool = True,
    is_strict: bool = True,
) -> tuple[Path, Any]:
    """Puts the engine where it was when the checkpoint was saved; collective. Returns its folder and client state.

    An engine without an optimizer, or under `module_only`, takes only the weights; without `with_scheduler` the
    schedule stays where it is; unless `is_strict`, weights that only one side has stay as they are. Everything is
    checked before anything is loaded.

    Raises:
        ValueError: no such checkpoint; an incomplete or damaged one, one of another model or of a newer format; one
            whose optimizer or scheduler is not this engine's. The engine is unchanged.
    """
    trains = engine.optimizer is not None and not module_only
    folder, state, stored = on_rank_zero(lambda: _read_and_check(engine, Path(directory), tag, trains, is_strict))
    engine.zero_grad()
    with engine.sharding.as_shards():
        if engine.optimizer is not None:
            engine.optimizer.renew_masters()  # those of weights that the checkpoint may not have
        optimizer_state = _load_tensors(engine, folder, stored, trains)
        if trains:
            _restore_training(engine, state, optimizer_state, with_scheduler)
        elif engine.optimizer is not None:
            engine.optimizer.write_masters_back()
    return folder, {} if state["client_state"] is None else state["client_state"]


def _load_tensors(
    engine: "ZeroEngine", folder: Path, stored: StoredTensors, trains: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """Loads the weights that are stored, or their masters, in place; returns the optimizer's state if it `trains`."""
    tensors = {key: tensor for key, tensor in _weights(engine).items() if key in stored}
    optimizer_state: dict[str, dict[str, torch.Tensor]] = {}
    if trains:
        assert engine.optimizer is not None
        of_optimizer = {key: entry for key, entry in stored.items() if key.startswith("optimizer.")}
        optimizer_state = _allocate_optimizer_state(engine.optimizer, of_optimizer)
        tensors.update(_optimizer_keys(optimizer_state))
    with _without_process_group_warning():
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=_is_alone(engine))
    return optimizer_state


def _read_and_check(
    engine: "ZeroEngine", directory: Path, tag: str | int | None, trains: bool, is_strict: bool
) -> tuple[Path, dict[str, Any], StoredTensors]:
    folder = checkpoint_folder.find(directory, None if tag is None else str(tag))
    own = _build_manifest(engine)
    saved = checkpoint_folder.read_manifest(folder)
    check_manifest(folder, saved, own if trains else {**own, "groups": None}, is_strict)
    state = _read_state(folder)
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return folder, state, {key: (tuple(entry.size), entry.properties.dtype) for key, entry in metadata.items()}


def _read_state(folder: Path) -> dict[str, Any]:
    serialized = (folder / STATE_FILE).read_bytes()
    try:
        return torch.load(io.BytesIO(serialized), weights_only=True, map_location="cpu")
    # Garbled bytes make torch raise nearly anything: UnpicklingError, RuntimeError, KeyError, UnicodeDecodeError, ...
    except Exception as error:
        raise ValueError(
            f"checkpoint {str(folder)!r} is damaged: {STATE_FILE} cannot be read; load another tag"
        ) from error


@contextmanager
def _without_process_group_warning() -> Iterator[None]:
    """Being a single process is no accident that the user should be warned of at every save."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _is_alone(engine: "ZeroEngine") -> bool:
    return engine.sharding.world_size == 1


def _check_at_boundary(engine: "ZeroEngine") -> None:
    done = engine.num_pending_micro_batches
    if done:
        raise ValueError(
            f"save_checkpoint(): {done} of {engine.config.gradient_accumulation_steps} micro-batches of a step are "
            f"done and their gradients are not saved; save after the step() that ends the accumulation"
        )


def _weights(engine: "ZeroEngine") -> dict[str, torch.Tensor]:
    masters = {t.name: t.master for t in engine.optimizer.parameters} if engine.optimizer is not None else {}
    named = {**dict(engine.module.named_parameters()), **masters, **_persistent_buffers(engine.module)}
    return {f"weights.{name}": tensor.detach() for name, tensor in named.items()}


def _frozen_names(engine: "ZeroEngine") -> set[str]:
    trained = {t.name for t in engine.optimizer.parameters} if engine.optimizer is not None else set()
    return {name for name, p in engine.module.named_parameters() if not p.requires_grad} - trained


def _persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, child in module.named_modules()
        for name, buffer in child.named_buffers(recurse=False)
        if name not in child._non_persistent_buffers_set
    }


def _collect_tensors(engine: "ZeroEngine") -> dict[str, torch.Tensor]:
    if engine.optimizer is None:
        return _weights(engine)
    return {**_weights(engine), **_optimizer_keys(_named_optimizer_state(engine.optimizer, tensors=True))}


def _named_optimizer_state(optimizer: ZeroOptimizer, *, tensors: bool) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter name: either its tensors or its other values."""
    return {
        t.name: {
            key: value
            for key, value in optimizer.state.get(t.master, {}).items()
            if isinstance(value, torch.Tensor) == tensors
        }
        for t in optimizer.parameters
    }


def _optimizer_keys(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"optimizer.{key}.{name}": value for name, values in state.items() for key, value in values.items()}


def _collect_state(engine: "ZeroEngine") -> dict[str, Any]:
    state: dict[str, Any] = {name: getattr(engine, name) for name in COUNTERS}
    state["random"] = gather_objects(get_random_state())
    if engine.optimizer is not None:
        state["loss_scaler"] = engine.optimizer.loss_scaler.state_dict()
        state["param_groups"] = _named_param_groups(engine.optimizer)
        state["optimizer_values"] = _named_optimizer_state(engine.optimizer, tensors=False)
    if engine.lr_scheduler is not None:
        state["lr_scheduler"] = engine.lr_scheduler.state_dict()
    if engine.training_dataloader is not None:
        state["dataloader"] = engine.training_dataloader.state_dict()
    return state


def _named_param_groups(optimizer: ZeroOptimizer) -> list[dict[str, Any]]:
    names = {id(t.master): t.name for t in optimizer.parameters}
    return [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "names": [names[id(p)] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]


def _serialize(state: dict[str, Any]) -> bytes:
    for name, value in state.items():
        if not _is_storable(value):
            path, part = _find_unstorable(name, value, outer=(value,))
            raise ValueError(
                f"{path} holds a {type(part).__name__}, which cannot be stored, or not read back without running "
                f"code; use numbers, strings, lists, dicts and tensors only"
            )
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _is_storable(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    # Pickling runs the object's own code: a lambda raises AttributeError, a lock TypeError, others what they like.
    except Exception:
        return False
    return True


def _find_unstorable(path: str, value: Any, outer: tuple[Any, ...]) -> tuple[str, Any]:
    """The innermost part of `value` that cannot be stored, and where it is; `outer` are the parts around it."""
    children: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        children = [(key, part) for key, child in value.items() for part in (key, child)]
    elif isinstance(value, (list, tuple)):
        children = list(enumerate(value))
    for key, child in children:
        if not any(child is part for part in outer) and not _is_storable(child):
            return _find_unstorable(f"{path}[{key!r}]", child, (*outer, child))
    return path, value


def _build_manifest(engine: "ZeroEngine", left_out: Collection[str] = ()) -> dict[str, Any]:
    optimizer = engine.optimizer
    shapes = {key.removeprefix("weights."): list(tensor.shape) for key, tensor in _weights(engine).items()}
    return {
        "format": FORMAT,
        "world_size": engine.sharding.world_size,
        "stage": engine.sharding.stage,
        "dtype": str(engine.config.dtype),
        "shapes": {name: shape for name, shape in shapes.items() if name not in left_out},
        "left_out": {name: shape for name, shape in shapes.items() if name in left_out},
        "has_scheduler": engine.lr_scheduler is not None,
        "optimizer": None if optimizer is None else _describe_optimizer(optimizer.inner),
        "groups": None if optimizer is None else [group["names"] for group in _named_param_groups(optimizer)],
    }


def _describe_optimizer(inner: torch.optim.Optimizer) -> dict[str, Any]:
    # `defaults` are the options that every group has; the groups may hold more, such as a scheduler's `initial_lr`.
    return {"class": type(inner).__name__, "options": sorted(inner.defaults)}


def _allocate_optimizer_state(optimizer: ZeroOptimizer, stored: StoredTensors) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors to load into, sharded like the parameter where they have its shape."""
    state: dict[str, dict[str, torch.Tensor]] = {t.name: {} for t in optimizer.parameters}
    masters = {t.name: t.master for t in optimizer.parameters}
    for full_key, (shape, dtype) in stored.items():
        key, name = full_key.removeprefix("optimizer.").split(".", 1)
        master = masters[name]
        is_like_master = shape == tuple(master.shape)
        state[name][key] = torch.zeros_like(master, dtype=dtype) if is_like_master else torch.zeros(shape, dtype=dtype)
    return state


def _restore_training(
    engine: "ZeroEngine",
    state: dict[str, Any],
    optimizer_state: dict[str, dict[str, torch.Tensor]],
    with_scheduler: bool,
) -> None:
    assert engine.optimizer is not None
    engine.optimizer.restore(state["param_groups"], optimizer_state, state["optimizer_values"])
    engine.optimizer.loss_scaler.load_state_dict(state["loss_scaler"])
    for name in COUNTERS:
        setattr(engine, name, state[name])
    # Counted anew: on another number of processes a step may have another number of micro-batches.
    engine.micro_steps = engine.global_steps * engine.config.gradient_accumulation_steps
    if engine.lr_scheduler is not None and with_scheduler:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    if engine.training_dataloader is not None and "dataloader" in state:
        engine.training_dataloader.load_state_dict(state["dataloader"])
    # A process that the saving run did not have keeps its own random state.
    if engine.sharding.rank < len(state["random"]):
        set_random_state(state["random"][engine.sharding.rank])
