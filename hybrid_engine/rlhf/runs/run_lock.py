"""One run at a time writes into a folder; a lock that the system takes back when the process ends, however it ends.

Apart from `run_folder.py`, which the command imports without torch.
"""

from pathlib import Path

from hybrid_engine.checkpoint.saving import LOCK_FILE, FolderLock, lock_folder


def lock_run(folder: Path) -> FolderLock:
    """Keeps other processes' runs from writing into `folder`, which is there, for as long as the lock lives.

    Raises:
        ValueError: a run of another process writes there.
    """
    try:
        return lock_folder(folder)
    except ValueError as error:
        raise ValueError(
            f"--out: a run that still goes on writes into {str(folder)!r}; wait for it or end it, or give another --out"
        ) from error


def check_not_running(folder: Path) -> None:
    """ValueError where a run of another process writes into `folder`, which need not be there."""
    if (folder / LOCK_FILE).exists():
        lock_run(folder)
