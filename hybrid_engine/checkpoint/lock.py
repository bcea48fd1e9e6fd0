"""One run saves into a folder at a time: a lock that the system takes back when the process ends, however it ends.

It is a POSIX lock on a file in the folder. Forked children, such as a data loader's workers, do not inherit it, and it
works over NFS too, where the server keeps the lock of a machine that died until it is back or its lease is over.
"""

import errno
import fcntl
import logging
import os
import socket
import weakref
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("hybrid_engine")

LOCK_FILE = ".hybrid_engine.lock"
TAKEN = {errno.EACCES, errno.EAGAIN}


class FolderLock:
    """Keeps other processes from saving into a folder for as long as it lives."""

    def __init__(self, descriptor: int) -> None:
        self._closing = weakref.finalize(self, os.close, descriptor)


# The system counts locks by process, and closing any descriptor of a locked file gives up the process's lock: a second
# engine that saves there must get the same object. The key is (process, device, inode).
_held: "weakref.WeakValueDictionary[tuple[int, int, int], FolderLock]" = weakref.WeakValueDictionary()


def lock_folder(directory: Path) -> FolderLock:
    """A lock on `directory`, shared by all engines of this process.

    On a file system without locks there is only a warning.

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


def _key(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return os.getpid(), status.st_dev, status.st_ino


def _sign(descriptor: int) -> None:
    """Leaves a note for others. A full disk is no reason to refuse the lock."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())


def _describe_holder(directory: Path, path: Path) -> str:
    holder = path.read_text(errors="replace").strip() or "another process"
    return (
        f"save_dir={str(directory)!r} is in use: {holder} saves its checkpoints there; give each run a folder of its "
        f"own, or end that process"
    )
