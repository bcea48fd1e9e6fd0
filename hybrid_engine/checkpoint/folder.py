"""The layout of the folders of checkpoints. A process killed at any moment leaves every finished checkpoint loadable.

    <directory>/latest            the tag to load by default
    <directory>/<tag>/            a finished checkpoint
    <directory>/.<tag>.writing/   one being written; a leftover is ignored and removed by the next save
    <directory>/.<tag>.replaced/  the old one of the same tag, between two renames
    <directory>/.hybrid_engine.lock   held by the run that saves here (`saving.py`)
    <directory>/zero_to_fp32.py   as DeepSpeed's: a user who runs it gets the fp32 weights in one file

`writing_files` and `writing_folder` write exports in the same way: into a marked folder that is moved to its place at
the end. A killed process leaves such a folder, and the next one removes it.

Everything here is local to one process. Only files written here are removed: a folder that has the name of a tag and is
not a checkpoint stays, and so do files that a user put next to ours.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from hybrid_engine.checkpoint.manifest import LATEST, MANIFEST, MARK, check_tag, is_manifest, list_files, write_manifest

DEEPSPEEDS_FILES = ("*model_states.pt", "zero/*")
"""Patterns of files in every checkpoint of DeepSpeed, at each ZeRO stage, and in a universal one."""
DEEPSPEEDS_SHARDS = "*optim_states.pt"
"""Pattern of files that DeepSpeed's checkpoints have from stage 1 on."""
NEW_LATEST = ".latest.hybrid_engine"
"""Name of the file that becomes `latest`, while it is in the checkpoint that it names."""
SCRIPT = "zero_to_fp32.py"
SCRIPT_TEXT = """# Written by hybrid_engine, which has to be installed:
#     python zero_to_fp32.py . OUTPUT_FOLDER
# writes the fp32 weights of the latest checkpoint in this folder to OUTPUT_FOLDER; --help says more.
from hybrid_engine.extensions.deepspeed.zero_to_fp32 import main

if __name__ == "__main__":
    main()
"""
UNMARKED = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|state\.pt|checkpoint\.json")
"""The files of a checkpoint; identify a leftover that was written before there were marks."""
WRITING = ".writing"


def begin(directory: Path, tag: str) -> Path:
    """Makes an empty folder to write the checkpoint `tag` into; removes leftovers of killed saves in `directory`.

    Raises:
        ValueError: something that is not a checkpoint has the name of the tag or of a file that is needed.
    """
    for replaced in directory.glob(".*.replaced"):
        _settle_replaced(replaced)
    for leftover in directory.glob(".*.writing"):
        _clear(leftover)
    _check_place(directory, tag)
    writing = directory / f".{tag}.writing"
    make(writing)
    return writing


def make_directory(directory: Path) -> None:
    """Makes the folder for checkpoints; raises OSError if it cannot be made."""
    directory.mkdir(parents=True, exist_ok=True)


def publish(
    writing: Path, directory: Path, tag: str, manifest: dict[str, Any], checksums: dict[str, str], is_latest: bool
) -> None:
    """Makes the written folder the checkpoint `tag` and, with `is_latest`, the latest one.

    `manifest` is stored with the sizes and the checksums of all files. Each step is on disk before the next begins.
    """
    _write_script(writing, directory)
    write_manifest(writing, manifest, checksums)
    if is_latest:
        (writing / NEW_LATEST).write_text(tag)
    for path in [*writing.iterdir(), writing]:
        _sync(path)
    target, replaced = directory / tag, directory / f".{tag}.replaced"
    if target.exists():
        target.rename(replaced)
    writing.rename(target)
    _sync(directory)
    if is_latest:
        (target / NEW_LATEST).replace(directory / LATEST)
        _sync(directory)
    (target / MARK).unlink()
    _settle_replaced(replaced)


def _write_script(writing: Path, directory: Path) -> None:
    """Writes `zero_to_fp32.py`, whole or not at all; an existing file stays, as it may be DeepSpeed's."""
    script = directory / SCRIPT
    if not script.exists() and not script.is_symlink():
        (writing / SCRIPT).write_text(SCRIPT_TEXT)
        (writing / SCRIPT).replace(script)


def abandon(writing: Path, directory: Path, tag: str) -> None:
    """Removes the files of a checkpoint that cannot be finished; an older one of the same tag stays."""
    if writing.exists():
        remove(writing)
    _settle_replaced(directory / f".{tag}.replaced")


def find(directory: Path, tag: str | None) -> Path:
    """The folder of the checkpoint `tag`, or of the latest one.

    Raises:
        ValueError: it does not exist.
    """
    if not directory.is_dir():
        raise ValueError(
            f"load_dir={str(directory)!r} is not a folder; give the one that was passed to save_checkpoint()"
        )
    if tag is None:
        tag = _read_latest(directory)
    check_tag(tag)
    for folder in (directory / tag, directory / f".{tag}.replaced"):
        if folder.is_dir():
            return folder
    raise ValueError(f"tag={tag!r}: there is no such checkpoint in {str(directory)!r}; found {_list_tags(directory)}")


def check_not_deepspeeds(folder: Path) -> None:
    """Raises ValueError, which says how to convert the weights, if DeepSpeed wrote the checkpoint in `folder`."""
    if _is_deepspeeds(folder):
        raise ValueError(
            f"checkpoint {str(folder)!r} was written by DeepSpeed; {_how_to_convert(folder)}, load them into the "
            f"model and give that model to initialize()"
        )


def discard(directory: Path, tag: str, successor: str) -> None:
    """Removes the checkpoint `tag` after `successor` was saved; files that a user put into it move to `successor`.

    A folder that is not a checkpoint saved here stays.
    """
    if tag != successor and _is_ours(directory / tag):
        _remove_replaced(directory / tag, directory / successor)


def _check_place(directory: Path, tag: str) -> None:
    """Checks that the checkpoint `tag` replaces a checkpoint of ours, an empty folder or nothing; raises ValueError."""
    target, replaced, latest = directory / tag, directory / f".{tag}.replaced", directory / LATEST
    if (target.exists() or target.is_symlink()) and not _is_ours(target) and not is_empty(target):
        raise ValueError(
            f"tag={tag!r}: {str(target)!r} is not a checkpoint saved here and would be replaced; give another tag, or "
            "move it away"
        )
    if replaced.exists() or replaced.is_symlink():
        raise ValueError(f"tag={tag!r}: {str(replaced)!r} is in the way and not a checkpoint saved here; move it away")
    if latest.is_symlink() or (latest.exists() and not latest.is_file()):
        raise ValueError(
            f"save_dir={str(directory)!r}: {LATEST!r} in it is not a plain file, but must contain the name of the "
            "latest checkpoint; move it away"
        )


def _is_ours(folder: Path) -> bool:
    return not folder.is_symlink() and is_manifest(folder)


def _settle_replaced(replaced: Path) -> None:
    """Removes a checkpoint that was replaced, or restores its name if no other checkpoint has it."""
    original = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
    if is_empty(replaced):
        replaced.rmdir()
    if not _is_ours(replaced):
        return
    if is_empty(original):
        original.rmdir()
    if _is_ours(original):
        _remove_replaced(replaced, original)
    elif not original.exists() and not original.is_symlink():
        replaced.rename(original)


def _remove_replaced(folder: Path, successor: Path) -> None:
    """Removes the files of the checkpoint in `folder`; files that a user put there move to its successor.

    The manifest is removed last, so that a process killed here leaves a folder that is still recognized as ours.
    """
    for name in [*list_files(folder), NEW_LATEST, MARK]:
        (folder / name).unlink(missing_ok=True)
    for path in [path for path in folder.iterdir() if path.name != MANIFEST]:
        path.rename(_free_name(successor / path.name))
    (folder / MANIFEST).unlink()
    folder.rmdir()


def _free_name(path: Path) -> Path:
    while path.exists() or path.is_symlink():
        path = path.with_name(f"{path.name}.old")
    return path


def _clear(leftover: Path) -> None:
    """Removes the leftover of a killed save; a user's folder stays."""
    if not leftover.is_dir() or leftover.is_symlink():
        return
    names = [path.name for path in leftover.iterdir()]
    is_unmarked = any(name.endswith(".distcp") for name in names) and all(map(UNMARKED.fullmatch, names))
    if is_unmarked:
        remove(leftover)
    else:
        clear(leftover)


def _read_latest(directory: Path) -> str:
    latest = directory / LATEST
    if not latest.is_file():
        if _is_checkpoint(directory):
            advice = f"it is a checkpoint itself, give load_dir={str(directory.parent)!r} and tag={directory.name!r}"
        else:
            advice = f"give the tag of a checkpoint in it; found {_list_tags(directory)}"
        raise ValueError(f"load_dir={str(directory)!r} has no file {LATEST!r}; {advice}")
    tag = latest.read_text(errors="replace").strip()
    if not tag:
        raise ValueError(f"{str(latest)!r} is empty; give the tag of a checkpoint; found {_list_tags(directory)}")
    return tag


def _list_tags(directory: Path) -> str:
    found = sorted(path.name for path in directory.glob("[!.]*") if path.is_dir() and _is_checkpoint(path))
    return ", ".join(found) or "none"


def _is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() or _is_deepspeeds(folder)


def _is_deepspeeds(folder: Path) -> bool:
    return not (folder / MANIFEST).is_file() and any(any(folder.glob(pattern)) for pattern in DEEPSPEEDS_FILES)


def _how_to_convert(folder: Path) -> str:
    """Says where the whole weights of a checkpoint of DeepSpeed are, or how to convert them."""
    if any(folder.glob("mp_rank_*model_states.pt")) and not any(folder.glob(DEEPSPEEDS_SHARDS)):
        return f"its weights are the entry 'module' of {str(next(folder.glob('mp_rank_*model_states.pt')))!r}"
    script = folder.parent / SCRIPT
    is_deepspeeds = script.is_file() and script.read_text(errors="replace") != SCRIPT_TEXT
    run = f"python {script}" if is_deepspeeds else "python -m deepspeed.utils.zero_to_fp32"
    return (
        f"convert its weights with DeepSpeed's own `{run} {folder.parent} <folder> -t {folder.name}` (from_pretrained "
        f"reads that folder, load_state_dict its pytorch_model.bin)"
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
