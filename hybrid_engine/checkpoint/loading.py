"""Loads a checkpoint into a ZeroEngine: all of it is read and checked before the engine is changed."""

import copy
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata

from hybrid_engine.checkpoint import folder as folders
from hybrid_engine.checkpoint.manifest import (
    PartsToLoad,
    check_files,
    check_folder,
    check_manifest,
    read_manifest,
    warn_of_differences,
)
from hybrid_engine.checkpoint.saving import (
    COUNTERS,
    MEASURED,
    OPTIMIZER,
    TrainingState,
    build_manifest,
    collect_weights,
    get_random_state,
    named_param_groups,
    optimizer_keys,
    set_random_state,
    with_shards,
)
from hybrid_engine.checkpoint.tensor_files import INDEX_FILE, STATE_FILE, read_index, read_tensors, read_values
from hybrid_engine.distributed.processes import on_rank_zero
from hybrid_engine.distributed.verdict import HeldInterrupts, agree, holding_interrupts
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.zero.sharding import local_tensor

logger = logging.getLogger("hybrid_engine")
Result = TypeVar("Result")
NamedState = dict[str, dict[str, torch.Tensor]]
"""Tensors of an optimizer's state by parameter name and key."""


class Undo:
    """The state of a training engine before a load. Weights are swapped with the loaded ones, and swapped back on undo.

    It keeps references to the optimizer's tensors, because loading replaces them and does not write into them.
    """

    def __init__(self, training: TrainingState) -> None:
        self._exchanged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._random = get_random_state()
        self._measured = training.measured_values()
        self._counters = {name: getattr(training.counters, name) for name in COUNTERS}
        # Copies: schedulers may return their own lists.
        self._states = [(part, copy.deepcopy(part.state_dict())) for part in _parts(training)]
        inner: Any = training.optimizer.inner if training.optimizer is not None else None
        self._inner, self._fields = inner, dict(vars(inner)) if inner is not None else {}
        self._groups = [dict(group) for group in inner.param_groups] if inner is not None else []

    @torch.no_grad()
    def exchange(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Swaps the contents of the two tensors of each pair."""
        for live, staged in pairs:
            before = live.clone()
            live.copy_(staged)
            staged.copy_(before)
            self._exchanged.append((live, staged))

    @torch.no_grad()
    def undo(self, training: TrainingState) -> None:
        """Restores the engine."""
        for live, staged in self._exchanged:
            live.copy_(staged)
        if self._inner is not None:
            vars(self._inner).clear()
            vars(self._inner).update(self._fields)
            for group, before in zip(self._inner.param_groups, self._groups, strict=True):
                group.clear()
                group.update(before)
        for part, state in self._states:
            part.load_state_dict(state)
        for name, value in self._counters.items():
            setattr(training.counters, name, value)
        set_random_state(self._random)
        training.restore_measured_values(self._measured)
        if training.optimizer is not None:
            training.optimizer.masters.write_back()


def _parts(training: TrainingState) -> list[Any]:
    parts: list[Any] = [training.lr_scheduler, training.training_dataloader]
    if training.optimizer is not None:
        parts.append(training.optimizer.loss_scaler)
    return [part for part in parts if part is not None]


class Opened(NamedTuple):
    """A checkpoint whose manifest matches the engine."""

    folder: Path
    values: dict[str, Any]
    """The checkpoint's plain values, by name."""
    index: Metadata
    """The tensors that it has, and their places."""
    checksums: dict[str, str]
    """Checksums of the files of tensors, by name; empty for an old checkpoint."""


class Staged(NamedTuple):
    """Tensors that were read from a checkpoint and are not yet in the engine."""

    weights: dict[str, torch.Tensor]
    """Weights by key, sharded and on the device like the engine's."""
    optimizer: NamedState


def load(
    training: TrainingState,
    directory: str | os.PathLike[str],
    tag: str | int | None,
    *,
    module_only: bool = False,
    with_optimizer: bool = True,
    with_scheduler: bool = True,
    is_strict: bool = True,
) -> tuple[Path, Any]:
    """Restores the engine to its state when the checkpoint was saved; collective. Returns its folder and client state.

    An engine without an optimizer, or under `module_only`, takes only the weights. Without `with_optimizer` the
    optimizer's state, its options and the loss scale stay as they are, without `with_scheduler` the schedule does;
    unless `is_strict`, weights that only one side has are left as they are.

    Everything is read into new tensors, compared with its checksums and checked before anything is changed. After an
    error or Ctrl-C the engine is as it was, on every process. For a moment this needs additional memory of the size of
    this process's masters, or fp32 parameters, and optimizer state.

    Raises:
        ValueError: no such checkpoint; an incomplete or damaged one, one of another model or of a newer format; one
            whose optimizer or scheduler is not this engine's. The engine is unchanged.
        OSError: it cannot be read. The engine is unchanged.
    """
    trains = training.optimizer is not None and not module_only
    wanted = PartsToLoad(training=trains, optimizer=trains and with_optimizer, scheduler=trains and with_scheduler)
    with holding_interrupts() as held:
        opened = on_rank_zero(lambda: _open(training, check_folder("load_dir", directory), tag, wanted, is_strict))
        with_shards(training, lambda: _take_over(training, opened, wanted, held))
    client_state = opened.values.get("client_state")
    return opened.folder, {} if client_state is None else client_state


def _open(
    training: TrainingState, directory: Path, tag: str | int | None, wanted: PartsToLoad, is_strict: bool
) -> Opened:
    folder = folders.find(directory, None if tag is None else str(tag))
    folders.check_not_deepspeeds(folder)
    manifest, own = read_manifest(folder), build_manifest(training)
    check_manifest(folder, manifest, own, wanted, is_strict)
    checksums = manifest.get("checksums", {})
    small = {name: checksums.pop(name) for name in (STATE_FILE, INDEX_FILE) if name in checksums}
    check_files(folder, small)
    values = _raising_value_errors(folder, lambda: _pick(training, read_values(folder), wanted))
    if wanted.training:
        _raising_value_errors(folder, lambda: warn_of_differences(folder, manifest, values, own, _own_values(training)))
    return Opened(folder, values, read_index(folder, manifest["files"]), checksums)


def _own_values(training: TrainingState) -> dict[str, Any]:
    assert training.optimizer is not None
    scheduler = training.lr_scheduler
    return {
        "param_groups": named_param_groups(training.optimizer),
        "lr_scheduler": {} if scheduler is None else scheduler.state_dict(),
    }


def _pick(training: TrainingState, values: dict[str, Any], wanted: PartsToLoad) -> dict[str, Any]:
    """The plain values of a checkpoint that are to be loaded.

    Raises:
        KeyError: one is missing.
        ValueError: one does not fit this engine.
    """
    names = ["client_state"]
    if wanted.training:
        names += [*COUNTERS, "random"]
        names += ["measured"] if "measured" in values else []  # earlier versions stored none
        names += ["dataloader"] if training.training_dataloader is not None and "dataloader" in values else []
    if wanted.optimizer:
        names += ["param_groups", "optimizer_values"]
        names += ["loss_scaler"] if _has_this_scaler(training, values["loss_scaler"]) else []
    if wanted.scheduler and training.lr_scheduler is not None:
        names += ["lr_scheduler"]
        _check_schedule(training.lr_scheduler.state_dict(), values["lr_scheduler"])
    if wrong := [name for name in COUNTERS if name in names and type(values[name]) is not int]:
        raise ValueError(f"{wrong[0]} is {values[wrong[0]]!r}, not a number")
    if "measured" in names:
        _check_measured(values["measured"])
    return {name: values[name] for name in names}


def _check_measured(measured: Any) -> None:
    is_known = isinstance(measured, dict) and set(measured) <= set(MEASURED)
    if not is_known or not all(figure is None or _is_pair(figure) for figure in measured.values()):
        raise ValueError(f"measured is {measured!r}, not pairs of numbers by {', '.join(MEASURED)}")


def _is_pair(figure: Any) -> bool:
    return isinstance(figure, list) and [type(number) for number in figure] == [float, float]


def _check_schedule(own: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises ValueError unless `saved` has all public entries of `own`; private ones differ between versions."""
    missing = [name for name in own if not name.startswith("_") and name not in saved]
    if missing:
        raise ValueError(f"it was saved with another learning-rate scheduler, its state has no {', '.join(missing)}")


def _has_this_scaler(training: TrainingState, saved: dict[str, Any]) -> bool:
    """Whether the loss scaler can load `saved`: not one of another kind, nor a static scale, which the config sets."""
    assert training.optimizer is not None
    own = training.optimizer.loss_scaler.state_dict()
    if saved == own or (saved.keys() == own.keys() and len(own) > 1):
        return True
    logger.warning(
        "load_checkpoint(): the checkpoint has the loss scale %g, %s, and this engine's stays %g, %s",
        *(part for state in (saved, own) for part in (state["scale"], "fixed" if len(state) == 1 else "dynamic")),
    )
    return False


def _take_over(training: TrainingState, opened: Opened, wanted: PartsToLoad, held: HeldInterrupts) -> None:
    """Reads, checks, and then changes the engine, whose parameters are shards; collective. Errors are raised on all."""
    staged = agree(lambda: _stage(training, opened, wanted, held))
    undo = agree(lambda: Undo(training))

    def commit() -> None:
        _raising_value_errors(opened.folder, lambda: _commit(training, opened, staged, wanted, undo))
        held.pass_on()

    try:
        agree(commit)
    except BaseException:
        undo.undo(training)
        raise
    training.accumulation.drop()
    if wanted.training:
        # Recomputed: on another number of processes a step may have another number of micro-batches.
        training.counters.micro_steps = training.counters.global_steps * training.counters.num_micro_batches


def _stage(training: TrainingState, opened: Opened, wanted: PartsToLoad, held: HeldInterrupts) -> Staged:
    with held.allowed():
        check_files(opened.folder, opened.checksums, training.sharding.rank, training.sharding.world_size)
        return _raising_value_errors(opened.folder, lambda: _read(training, opened, wanted))


def _read(training: TrainingState, opened: Opened, wanted: PartsToLoad) -> Staged:
    stored = opened.index.state_dict_metadata
    weights = {key: torch.empty_like(tensor) for key, tensor in collect_weights(training).items() if key in stored}
    state = _allocate_optimizer_state(training.optimizer, opened.index) if wanted.optimizer else {}
    read_tensors({**weights, **optimizer_keys(state)}, opened.folder, opened.index)
    return Staged(weights, state)


def _allocate_optimizer_state(optimizer: ZeroOptimizer | None, index: Metadata) -> NamedState:
    """Allocates tensors to load into, sharded like the parameter if they have its shape."""
    assert optimizer is not None
    state: NamedState = {t.name: {} for t in optimizer.parameters}
    masters = {t.name: t.master for t in optimizer.parameters}
    for full_key, entry in index.state_dict_metadata.items():
        if not full_key.startswith(OPTIMIZER):
            continue
        key, name = full_key.removeprefix(OPTIMIZER).split(".", 1)
        shape, dtype, master = tuple(entry.size), entry.properties.dtype, masters[name]
        is_like_master = shape == tuple(master.shape)
        state[name][key] = torch.zeros_like(master, dtype=dtype) if is_like_master else torch.zeros(shape, dtype=dtype)
    return state


def _commit(training: TrainingState, opened: Opened, staged: Staged, wanted: PartsToLoad, undo: Undo) -> None:
    values, optimizer = opened.values, training.optimizer
    if optimizer is not None:
        optimizer.masters.renew()  # masters of weights that the checkpoint may not have
    if wanted.training:
        _restore_progress(training, values)
    if wanted.optimizer:
        assert optimizer is not None
        optimizer.restore(values["param_groups"], staged.optimizer, values["optimizer_values"])
        if "loss_scaler" in values:
            optimizer.loss_scaler.load_state_dict(values["loss_scaler"])
    if "lr_scheduler" in values:
        _restore_schedule(training, values["lr_scheduler"], sets_rates=not wanted.optimizer)
    live = collect_weights(training)
    undo.exchange((local_tensor(live[key]), local_tensor(new)) for key, new in staged.weights.items())
    if optimizer is not None:
        optimizer.masters.write_back()


def _restore_progress(training: TrainingState, values: dict[str, Any]) -> None:
    for name in COUNTERS:
        setattr(training.counters, name, values[name])
    training.restore_measured_values(values.get("measured", {}))
    if training.training_dataloader is not None and "dataloader" in values:
        training.training_dataloader.load_state_dict(values["dataloader"])
    # A process with a rank that the saving run did not have keeps its own random state.
    if training.sharding.rank < len(values["random"]):
        set_random_state(values["random"][training.sharding.rank])


def _restore_schedule(training: TrainingState, state: dict[str, Any], sets_rates: bool) -> None:
    """Restores the schedule; `sets_rates` also writes its rates into the groups, if these are not loaded."""
    assert training.lr_scheduler is not None and training.optimizer is not None
    training.lr_scheduler.load_state_dict(state)
    if sets_rates and hasattr(training.lr_scheduler, "get_last_lr"):
        for group, rate in zip(training.optimizer.param_groups, training.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate


def _raising_value_errors(folder: Path, action: Callable[[], Result]) -> Result:
    """The result of `action` on values from a file. Errors but OSErrors become a ValueError that names the file."""
    try:
        return action()
    except OSError:
        raise
    except Exception as error:
        if isinstance(error, ValueError) and str(folder) in str(error):
            raise
        raise ValueError(
            f"checkpoint {str(folder)!r} cannot be loaded ({type(error).__name__}: {error}); load another tag"
        ) from error
