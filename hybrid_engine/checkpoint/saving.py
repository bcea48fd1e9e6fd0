"""Saves a checkpoint of a ZeroEngine: everything needed to continue as if the run had not stopped.

The contents are tensors by name, plain values, and the manifest that describes them; `loading.py` reads them. A trained
bf16 or fp16 parameter is stored as its fp32 master only, because the parameter is the rounded master.
"""

import errno
import fcntl
import logging
import os
import random
import shutil
import socket
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

from hybrid_engine.checkpoint import folder as folders
from hybrid_engine.checkpoint.manifest import check_folder, check_tag, describe_optimizer, file_checksum
from hybrid_engine.checkpoint.tensor_files import STATE_FILE, serialize, write_tensors
from hybrid_engine.config import EngineConfig
from hybrid_engine.distributed.dataloader import TrainingDataLoader
from hybrid_engine.distributed.processes import gather_objects, on_rank_zero
from hybrid_engine.distributed.verdict import HeldInterrupts, agree, holding_interrupts
from hybrid_engine.optim.accumulation import GradientAccumulation, StepCounters
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.zero.sharding import Sharding, saved_buffers

Result = TypeVar("Result")
WEIGHTS = "weights."
"""Prefix of the keys of weights and buffers."""
OPTIMIZER = "optimizer."
"""Prefix of the keys of the optimizer's state, `optimizer.<key of the state>.<name of the parameter>`."""
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
MEASURED = ("logprob_difference",)
"""Metrics that training reads later, each None or a mean and a maximum."""
LOCK_FILE = ".hybrid_engine.lock"
TAKEN = {errno.EACCES, errno.EAGAIN}
# The system counts locks per process, and closing any descriptor of a locked file releases the process's lock: a second
# engine that saves there must get the same object. The key is (process, device, inode).
_held: "weakref.WeakValueDictionary[tuple[int, int, int], FolderLock]" = weakref.WeakValueDictionary()
logger = logging.getLogger("hybrid_engine")


class TrainingState(Protocol):
    """The engine's state that a checkpoint saves and restores; `ZeroEngine` has it."""

    config: EngineConfig
    module: nn.Module
    sharding: Sharding
    optimizer: ZeroOptimizer | None
    """The optimizer shim; None in an engine that does not train."""
    lr_scheduler: Any
    training_dataloader: TrainingDataLoader | None
    counters: StepCounters
    accumulation: GradientAccumulation
    run_lock: "RunLock"

    def measured_values(self) -> dict[str, Any]:
        """Metrics that training measured and reads later, for a checkpoint: plain values by name."""

    def restore_measured_values(self, values: dict[str, Any]) -> None:
        """Restores the result of `measured_values`; raises errors for values of another kind."""


def with_shards(training: TrainingState, action: Callable[[], Result]) -> Result:
    """Runs `action` while the parameters are shards, and returns its result or raises its error; collective.

    Below stage 3 they are whole again afterwards, also after an error, which must be raised on every process.
    """
    failure: BaseException | None = None
    with training.sharding.as_shards():
        try:
            result = action()
        except BaseException as error:
            failure = error
    if failure is not None:
        raise failure
    return result


def collect_weights(training: TrainingState) -> dict[str, torch.Tensor]:
    """The parameters, or their masters, and the buffers that are saved, by key; as shards if they are sharded."""
    masters = {t.name: t.master for t in training.optimizer.parameters} if training.optimizer is not None else {}
    named = {**dict(training.module.named_parameters()), **masters, **saved_buffers(training.module)}
    return {f"{WEIGHTS}{name}": tensor.detach() for name, tensor in named.items()}


def collect_tensors(training: TrainingState) -> dict[str, torch.Tensor]:
    """The weights and the tensors of the optimizer's state, by their keys."""
    if training.optimizer is None:
        return collect_weights(training)
    return {**collect_weights(training), **optimizer_keys(_named_optimizer_state(training.optimizer, tensors=True))}


def optimizer_keys(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of an optimizer's state by key; `state` has them by parameter name."""
    return {f"{OPTIMIZER}{key}.{name}": value for name, values in state.items() for key, value in values.items()}


def other_copies(training: TrainingState) -> set[str]:
    """Names that this process does not save because rank 0 does: buffers, which each process holds in full."""
    return set(saved_buffers(training.module)) if training.sharding.rank else set()


def frozen_names(training: TrainingState) -> set[str]:
    """Names of the parameters that require no gradient."""
    trained = {t.name for t in training.optimizer.parameters} if training.optimizer is not None else set()
    return {name for name, p in training.module.named_parameters() if not p.requires_grad} - trained


def collect_values(training: TrainingState) -> dict[str, Any]:
    """Counters, metrics, the states of scheduler, loss scaler and data loader, and every process's random state.

    Collective.
    """
    values = agree(lambda: _collect_own_values(training))
    values["random"] = gather_objects(get_random_state())
    return values


def _collect_own_values(training: TrainingState) -> dict[str, Any]:
    values: dict[str, Any] = {name: getattr(training.counters, name) for name in COUNTERS}
    values["measured"] = training.measured_values()
    if training.optimizer is not None:
        values["loss_scaler"] = training.optimizer.loss_scaler.state_dict()
        values["param_groups"] = named_param_groups(training.optimizer)
        values["optimizer_values"] = _named_optimizer_state(training.optimizer, tensors=False)
    if training.lr_scheduler is not None:
        values["lr_scheduler"] = training.lr_scheduler.state_dict()
    if training.training_dataloader is not None:
        values["dataloader"] = training.training_dataloader.state_dict()
    return values


def build_manifest(training: TrainingState, left_out: Collection[str] = ()) -> dict[str, Any]:
    """The manifest that `check_manifest` compares; `left_out` are the names of parameters that are not saved."""
    optimizer = training.optimizer
    shapes = {key.removeprefix(WEIGHTS): list(tensor.shape) for key, tensor in collect_weights(training).items()}
    return {
        "world_size": training.sharding.world_size,
        "stage": training.sharding.stage,
        "dtype": str(training.config.dtype),
        "shapes": {name: shape for name, shape in shapes.items() if name not in left_out},
        "left_out": {name: shape for name, shape in shapes.items() if name in left_out},
        "tied": _tied_names(training.module),
        "frozen": sorted(frozen_names(training)),
        "has_scheduler": training.lr_scheduler is not None,
        "scheduler": None if training.lr_scheduler is None else type(training.lr_scheduler).__name__,
        "optimizer": None if optimizer is None else describe_optimizer(optimizer.inner),
        "groups": None if optimizer is None else [group["names"] for group in named_param_groups(optimizer)],
        "pending_micro_batches": training.counters.num_pending_micro_batches + (training.accumulation.num_passes > 0),
    }


def named_param_groups(optimizer: ZeroOptimizer) -> list[dict[str, Any]]:
    """The optimizer's groups with the `names` of parameters instead of `params`."""
    names = {id(t.master): t.name for t in optimizer.parameters}
    return [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "names": [names[id(p)] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]


def _named_optimizer_state(optimizer: ZeroOptimizer, *, tensors: bool) -> dict[str, dict[str, Any]]:
    return {
        t.name: {
            key: value
            for key, value in optimizer.state.get(t.master, {}).items()
            if isinstance(value, torch.Tensor) == tensors
        }
        for t in optimizer.parameters
    }


def _tied_names(module: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in named if first.setdefault(id(p), name) != name}


def get_random_state() -> dict[str, Any]:
    """The random states as values that `torch.load(weights_only=True)` can read."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restores a result of `get_random_state`; a GPU's state is ignored on a machine without one."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_everything(seed: int) -> None:
    """Seeds every generator whose state is kept here."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class FolderLock:
    """Keeps other processes from saving into a folder for as long as the object lives."""

    def __init__(self, descriptor: int) -> None:
        self._closing = weakref.finalize(self, os.close, descriptor)


def lock_folder(directory: Path) -> FolderLock:
    """A lock on `directory`, shared by all engines of this process.

    On a file system without locks it only logs a warning.

    Raises:
        ValueError: another process holds it.
        OSError: the lock's file cannot be made.
    """
    path = directory / LOCK_FILE
    if path.exists() and (held := _held.get(_key(path))) is not None:
        return held
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in TAKEN:
            os.close(descriptor)
            raise ValueError(_describe_holder(directory, path)) from None
        logger.warning("%s: the file system has no locks (%s); let only one run save there", directory, error)
    else:
        _sign(descriptor)
    lock = _held[_key(path)] = FolderLock(descriptor)
    return lock


class RunLock:
    """The lock of one engine on the folder that its checkpoints are saved into."""

    def __init__(self) -> None:
        self._held: FolderLock | None = None

    def take(self, directory: Path) -> None:
        """Holds the lock of `directory` in place of an earlier one. See `lock_folder`."""
        self._held = lock_folder(directory)


def _key(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return os.getpid(), status.st_dev, status.st_ino


def _sign(descriptor: int) -> None:
    """Writes this process's name into the lock file. A full disk is not a reason to refuse the lock."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())


def _describe_holder(directory: Path, path: Path) -> str:
    holder = path.read_text(errors="replace").strip() or "another process"
    return (
        f"save_dir={str(directory)!r} is in use: {holder} saves its checkpoints there; give each run a folder of its "
        f"own, or end that process"
    )


def save(
    training: TrainingState,
    directory: str | os.PathLike[str],
    tag: str | int | None,
    client_state: Any,
    is_latest: bool = True,
    without_frozen: bool = False,
) -> Path:
    """Writes the checkpoint `tag` (default `global_step<n>`) and with `is_latest` makes it the latest; collective.

    When it returns, the checkpoint is on disk; until then an older one of the same tag stays, and an error or Ctrl-C
    leaves it, the latest one and the engine as they were. Folder, tag and client state are rank 0's. From the first
    save on no other process can save into the folder, until this engine saves into another one or is deleted.
    `without_frozen` leaves out parameters that require no gradient, such as the base of adapters: an engine that loads
    the checkpoint keeps its own.

    The gradients of micro-batches since the last step stay in the engine and are not in the checkpoint: an engine that
    loads it starts that step again, with the micro-batches that follow.

    Raises:
        ValueError: not a path of a folder; a tag that is not a folder name, or names a folder that is not a checkpoint;
            a client state that does not consist of plain values and tensors; another process saves into the folder.
        OSError: the disk is full, or the folder cannot be written to. The files written so far are removed.
    """
    folder = on_rank_zero(lambda: check_folder("save_dir", directory))
    tag = on_rank_zero(lambda: check_tag(f"global_step{training.counters.global_steps}" if tag is None else str(tag)))
    left_out = frozen_names(training) if without_frozen else set()
    with holding_interrupts() as held:
        values = {**collect_values(training), "client_state": client_state}
        serialized: list[bytes] = []  # on rank 0
        on_rank_zero(lambda: serialized.append(serialize(values)))
        writing = on_rank_zero(lambda: _begin(training, folder, tag))
        try:
            checksums = _write_tensors(training, writing, left_out, held)
            manifest = build_manifest(training, left_out)

            def finish() -> None:
                held.pass_on()
                (writing / STATE_FILE).write_bytes(serialized[0])
                folders.publish(writing, folder, tag, manifest, checksums, is_latest)

            on_rank_zero(finish)
        except BaseException as error:
            on_rank_zero(lambda: _abandon(writing, folder, tag))
            if isinstance(error, OSError):
                raise _describe(error, training, folder) from None
            raise
    return folder / tag


def choose_tag(tag: str | int | None, validation: str) -> str | int | None:
    """The tag of rank 0, after a comparison with the others' as set by `checkpoint.tag_validation`; collective.

    Raises:
        ValueError: they differ and `validation` is "Fail".
    """
    tags = gather_objects(tag)
    if validation == "Ignore" or all(other == tags[0] for other in tags):
        return tags[0]
    message = f"save_checkpoint(): the processes give different tags, {tags}; give all of them the same"
    if validation == "Fail":
        raise ValueError(f"{message} (checkpoint.tag_validation is Fail)")
    logger.warning("%s; that of rank 0 is used", message)
    return tags[0]


def _begin(training: TrainingState, folder: Path, tag: str) -> Path:
    folders.make_directory(folder)
    training.run_lock.take(folder)
    return folders.begin(folder, tag)


def _write_tensors(
    training: TrainingState, writing: Path, left_out: Collection[str], held: HeldInterrupts
) -> dict[str, str]:
    """Writes the tensors, every process its shards; returns the checksums of the files by name. Collective."""

    def collect() -> dict[str, Any]:
        if training.optimizer is not None:
            training.optimizer.masters.renew()
        not_here = {*left_out, *other_copies(training)}
        return {key: t for key, t in collect_tensors(training).items() if key.removeprefix(WEIGHTS) not in not_here}

    def read_back() -> dict[str, str]:
        with held.allowed():
            return {path.name: file_checksum(path) for path in writing.glob(f"__{training.sharding.rank}_*")}

    is_alone = training.sharding.world_size == 1
    with_shards(training, lambda: write_tensors(agree(collect), writing, held, is_alone))
    checksums: dict[str, str] = {}
    for found in gather_objects(agree(read_back)):
        checksums.update(found)
    return checksums


def _abandon(writing: Path, folder: Path, tag: str) -> None:
    try:
        folders.abandon(writing, folder, tag)
    except OSError as error:
        logger.warning("save_checkpoint(): %s could not be removed (%s); the next save does it", writing, error)


def _describe(error: OSError, training: TrainingState, folder: Path) -> OSError:
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in collect_tensors(training).values())
    try:
        free = f"{shutil.disk_usage(folder).free:,}"
    except OSError:
        free = "an unknown number"
    return OSError(
        error.errno,
        f"save_checkpoint(): {str(folder)!r} could not be written to ({error.strerror or error}); the checkpoint takes "
        f"{num_bytes:,} bytes and {free} are free there. What was written of it is removed and older ones are whole; "
        f"free space, or give another folder",
    )
