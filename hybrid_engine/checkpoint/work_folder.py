"""Folders that files are written into before they are moved to their place, with a mark that tells them from others.

A killed process leaves such a folder. The next one removes it; a folder without the mark belongs to the user and stays.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

MARK = ".written_by_hybrid_engine"
WRITING = ".writing"


@contextmanager
def writing_files(folder: Path) -> Iterator[Path]:
    """Yields a folder for files that are moved into `folder` at the end; `folder` is made if it does not exist.

    They replace files of the same names; after an error they are removed.

    Raises:
        ValueError: something is in the way.
        OSError: the disk is full, or a similar error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writing = folder / WRITING
    make(writing)
    try:
        with _naming(folder):
            yield writing
            for path in sorted(path for path in writing.iterdir() if path.name != MARK):
                path.replace(folder / path.name)
    finally:
        remove(writing)


@contextmanager
def writing_folder(folder: Path) -> Iterator[Path]:
    """Yields a folder next to `folder`, which replaces it at the end; `folder` must not exist, or must be empty.

    After an error it is removed. A process that is killed leaves `folder` as it was; the next call removes the rest.

    Raises:
        ValueError: something is in the way.
        OSError: the disk is full, or a similar error.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    writing = folder.parent / f".{folder.name}{WRITING}"
    make(writing)
    try:
        with _naming(folder):
            yield writing
            writing.replace(folder)
    except BaseException:
        remove(writing)
        raise
    (folder / MARK).unlink()  # last: a process killed before this leaves a folder that the next one may remove


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Makes an error of the system name the folder that was being written, even if a library wrapped the error."""
    try:
        yield
    except Exception as error:
        cause = find_cause(error)
        if isinstance(cause, OSError):
            raise OSError(
                cause.errno, f"{str(folder)!r} could not be written to ({cause.strerror or cause}); free space there"
            ) from None
        raise


def save_state_dict(state: dict[str, Any], path: Path) -> None:
    """Calls `torch.save` on an open file: with a path, its error for a full disk only says that a stream has failed."""
    with path.open("wb") as file:
        torch.save(state, file)


def make(folder: Path) -> None:
    """Makes an empty marked folder; one that a killed process left there is removed first.

    Raises:
        ValueError: something else is there.
    """
    clear(folder)
    if folder.exists() or folder.is_symlink():
        raise ValueError(
            f"{str(folder)!r} is in the way: files are written there before they get their place, and it was not made "
            f"for that; move it away"
        )
    folder.mkdir()
    (folder / MARK).touch()


def clear(folder: Path) -> None:
    """Removes a folder that was made here or is empty; anything else stays."""
    if is_marked(folder) or is_empty(folder):
        remove(folder)


def is_marked(folder: Path) -> bool:
    """Whether `folder` was made here and is not a link to such a folder."""
    return not folder.is_symlink() and (folder / MARK).is_file()


def is_empty(folder: Path) -> bool:
    """Whether `folder` is an empty folder and not a link."""
    return not folder.is_symlink() and folder.is_dir() and not any(folder.iterdir())


def remove(folder: Path) -> None:
    """Removes `folder`, its mark last, so that a process killed here leaves it marked."""
    for path in [path for path in folder.iterdir() if path.name != MARK]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    (folder / MARK).unlink(missing_ok=True)
    folder.rmdir()


def find_cause(error: BaseException) -> BaseException:
    """The cause of an error from torch: an interruption, a system error, or a ValueError with its text."""
    causes = [cause for cause in _causes(error) if not isinstance(cause, CheckpointException)]
    for cause in causes:
        if not isinstance(cause, Exception):  # such as KeyboardInterrupt
            return cause
    for kind in (OSError, ValueError):
        for cause in causes:
            if isinstance(cause, kind):
                return cause
    first = causes[0] if causes else error
    if isinstance(first, SafetensorError):
        return OSError(str(first))
    text = str(first).strip().splitlines()[0] if str(first).strip() else ""
    return ValueError(f"{type(first).__name__}: {text}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error`, the errors that it wraps, and those that caused it."""
    if error is None:
        return
    yield error
    if isinstance(error, CheckpointException):
        for wrapped, _ in error.failures.values():
            yield from _causes(wrapped)
    yield from _causes(error.__cause__ or error.__context__)
