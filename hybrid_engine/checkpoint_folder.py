"""The folders checkpoints live in, so that a process killed at any moment leaves every finished checkpoint loadable.

    <directory>/latest            the tag to load by default
    <directory>/<tag>/            a finished checkpoint
    <directory>/.<tag>.writing/   one being written; a leftover is ignored and removed by the next save
    <directory>/.<tag>.replaced/  the old one of the same tag, between two renames

Everything here is local to one process; one directory belongs to one run.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from hybrid_engine.checkpoint_checks import check_format

MANIFEST = "checkpoint.json"
LATEST = "latest"
DEEPSPEEDS_FILES = ("*model_states.pt", "zero/*")
"""What every checkpoint of DeepSpeed has, at each ZeRO stage, and a universal one."""
DEEPSPEEDS_SHARDS = "*optim_states.pt"
"""What its checkpoints have from stage 1 on."""


def check_tag(tag: str) -> None:
    """Raises ValueError for a tag that is not the name of a folder of its own."""
    if not tag or tag.startswith(".") or tag == LATEST or "/" in tag or os.sep in tag:
        raise ValueError(
            f"tag={tag!r} must be a plain folder name, not hidden and not {LATEST!r}; e.g. 'global_step10'"
        )


def begin(directory: Path, tag: str) -> Path:
    """An empty folder to write the checkpoint `tag` into; clears what killed saves left behind.

    Raises:
        ValueError: `directory` is a file.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"save_dir={str(directory)!r} is a file; give a folder")
    directory.mkdir(parents=True, exist_ok=True)
    for replaced in directory.glob(".*.replaced"):
        original = directory / replaced.name.removeprefix(".").removesuffix(".replaced")
        if original.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(original)
    for leftover in directory.glob(".*.writing"):
        shutil.rmtree(leftover)
    folder = directory / f".{tag}.writing"
    folder.mkdir()
    return folder


def publish(folder: Path, directory: Path, tag: str, manifest: dict[str, Any], is_latest: bool = True) -> None:
    """Makes the written `folder` the checkpoint `tag` and, unless that is not wanted, the latest one.

    `manifest` is stored with the names and sizes of all files. Each step is on disk before the next begins.
    """
    files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    _write(folder / MANIFEST, json.dumps({**manifest, "files": files}))
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)
    target, replaced = directory / tag, directory / f".{tag}.replaced"
    if target.exists():
        target.rename(replaced)
    folder.rename(target)
    _sync(directory)
    if is_latest:
        _write(directory / f".{LATEST}.writing_file", tag)
        (directory / f".{LATEST}.writing_file").replace(directory / LATEST)
        _sync(directory)
    if replaced.exists():
        shutil.rmtree(replaced)


def find(directory: Path, tag: str | None) -> Path:
    """The folder of the checkpoint `tag`, or of the latest one.

    Raises:
        ValueError: there is none.
    """
    if not directory.is_dir():
        raise ValueError(f"load_dir={str(directory)!r} is no folder; give the one that save_checkpoint() was given")
    if tag is None:
        tag = _read_latest(directory)
    check_tag(tag)
    for folder in (directory / tag, directory / f".{tag}.replaced"):
        if folder.is_dir():
            return folder
    raise ValueError(f"tag={tag!r}: there is no such checkpoint in {str(directory)!r}; found {_list_tags(directory)}")


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


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `publish` stored.

    Raises:
        ValueError: the checkpoint is DeepSpeed's, or of a newer format, its manifest is damaged, or it is incomplete:
            a file is missing or has another size than when it was written.
    """
    path = folder / MANIFEST
    if _is_deepspeeds(folder):
        raise ValueError(
            f"checkpoint {str(folder)!r} was written by DeepSpeed; {_how_to_convert(folder)}, load them into the "
            f"model and give that model to initialize()"
        )
    if not path.is_file():
        raise ValueError(f"checkpoint {str(folder)!r} is incomplete: {MANIFEST} is missing; load another tag")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"checkpoint {str(folder)!r} is damaged: {MANIFEST} is not JSON; load another tag") from error
    check_format(folder, manifest)
    broken = [name for name, size in manifest["files"].items() if _size(folder / name) != size]
    if broken:
        raise ValueError(
            f"checkpoint {str(folder)!r} is incomplete: {len(broken)} of {len(manifest['files'])} files are missing or "
            f"cut off, the first {broken[0]!r}; load another tag"
        )
    return manifest


def _how_to_convert(folder: Path) -> str:
    """Where the whole weights of a checkpoint of DeepSpeed are, or how to get them."""
    if any(folder.glob("mp_rank_*model_states.pt")) and not any(folder.glob(DEEPSPEEDS_SHARDS)):
        return f"its weights are the entry 'module' of {str(next(folder.glob('mp_rank_*model_states.pt')))!r}"
    script = folder.parent / "zero_to_fp32.py"
    run = f"python {script}" if script.is_file() else "python -m deepspeed.utils.zero_to_fp32"
    return (
        f"convert its weights with DeepSpeed's own `{run} {folder.parent} <folder> -t {folder.name}` (from_pretrained "
        f"reads that folder, load_state_dict its pytorch_model.bin)"
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
