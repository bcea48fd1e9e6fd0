"""Saves a checkpoint of a ZeroEngine: everything needed to continue as if the run had not stopped."""

import errno
import fcntl
import logging
import os
import shutil
import socket
import weakref
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybrid_engine.checkpoint import folder as folders
from hybrid_engine.checkpoint.contents import (
    WEIGHTS,
    TrainingState,
    build_manifest,
    collect_tensors,
    collect_values,
    frozen_names,
    other_copies,
    with_shards,
)
from hybrid_engine.checkpoint.manifest import check_folder, check_tag, file_checksum
from hybrid_engine.checkpoint.tensor_files import STATE_FILE, serialize, write_tensors
from hybrid_engine.distributed.interrupts import HeldInterrupts, holding_interrupts
from hybrid_engine.distributed.processes import gather_objects, on_rank_zero
from hybrid_engine.distributed.verdict import agree

LOCK_FILE = ".hybrid_engine.lock"
TAKEN = {errno.EACCES, errno.EAGAIN}
# The system counts locks per process, and closing any descriptor of a locked file releases the process's lock: a second
# engine that saves there must get the same object. The key is (process, device, inode).
_held: "weakref.WeakValueDictionary[tuple[int, int, int], FolderLock]" = weakref.WeakValueDictionary()
logger = logging.getLogger("hybrid_engine")


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
