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
DEEPSPEEDS_FILES = "*model_states.pt"
"""What every checkpoint of DeepSpeed has, at each ZeRO stage."""


def check_tag(tag: str) -> None:
    """Raises ValueError for a tag that is not the name of a folder of its own."""
    if not tag or tag.startswith(".") or tag == LATEST or "/" in tag or os.sep in tag:
        raise ValueError(
            f"tag={tag!r} must be a plain folder name, not hidden and not {LATEST!r}; e.g. 'global_step10'"
        )


def begin(directory: Path, tag: str) -> Path:
    """An empty folder to write the checkpoint `tag` into; clears what killed saves left behind."""
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
    if tag is None:
        latest = directory / LATEST
        if not latest.is_file():
            raise ValueError(f"load_dir={str(directory)!r} has no file {LATEST!r}; give the tag of a checkpoint in it")
        tag = latest.read_text().strip()
    check_tag(tag)
    for folder in (directory / tag, directory / f".{tag}.replaced"):
        if folder.is_dir():
            return folder
    found = sorted(path.name for path in directory.glob("[!.]*") if path.is_dir())
    raise ValueError(
        f"tag={tag!r}: there is no such checkpoint in {str(directory)!r}; found {', '.join(found) or 'none'}"
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `publish` stored.

    Raises:
        ValueError: the checkpoint is DeepSpeed's, or of a newer format, its manifest is damaged, or it is incomplete:
            a file is missing or has another size than when it was written.
    """
    path = folder / MANIFEST
    if not path.is_file() and any(folder.glob(DEEPSPEEDS_FILES)):
        raise ValueError(
            f"checkpoint {str(folder)!r} was written by DeepSpeed; convert its weights with DeepSpeed's own "
            f"`python {folder.parent / 'zero_to_fp32.py'} {folder.parent} <folder>`, load them into the model "
            f"(from_pretrained, or load_state_dict of its pytorch_model.bin) and give that model to initialize()"
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
