"""A checkpoint's manifest, which lists its contents and the sizes and checksums of its files, and checks of names.

Keys: `format`, `files` (their sizes in bytes, by name), `checksums` (of the same files), `checksum` (of the rest of the
manifest), and those that `comparison.py` compares. A manifest of format 1 has no checksums and can still be read.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_engine.checkpoint.work_folder import MARK

MANIFEST = "checkpoint.json"
FORMAT = 2
WITHOUT_CHECKSUMS = 1
REQUIRED_KEYS = ("files", "shapes", "groups", "has_scheduler")
LATEST = "latest"
MAX_BYTES = 200
"""Maximum length of a name; file systems allow 255, and some names here get a few more characters."""
CHUNK_BYTES = 1 << 22


def write_manifest(folder: Path, content: Mapping[str, Any], checksums: Mapping[str, str]) -> None:
    """Writes the manifest of the checkpoint whose files are all in `folder`.

    `checksums` are those that are known already; the others are computed from the files.
    """
    paths = sorted(path for path in folder.iterdir() if path.name != MARK)
    manifest = {
        **content,
        "format": FORMAT,
        "files": {path.name: path.stat().st_size for path in paths},
        "checksums": {path.name: checksums.get(path.name) or file_checksum(path) for path in paths},
    }
    # Turns tuples into lists, as they are when it is read.
    manifest = json.loads(json.dumps(manifest))
    (folder / MANIFEST).write_text(json.dumps({**manifest, "checksum": content_checksum(manifest)}))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest that `write_manifest` stored, after a check of the sizes of the files.

    Raises:
        ValueError: a newer format, a damaged manifest, or an incomplete checkpoint: a file is missing or has another
            size than when it was written.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"checkpoint {str(folder)!r} is incomplete: {MANIFEST} is missing; load another tag")
    try:
        manifest = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"checkpoint {str(folder)!r} is damaged: {MANIFEST} is not JSON; load another tag") from error
    check_format(folder, manifest)
    broken = [name for name, size in manifest["files"].items() if _size(folder / name) != size]
    if broken:
        raise ValueError(
            f"checkpoint {str(folder)!r} is incomplete: {len(broken)} of {len(manifest['files'])} files are missing or "
            f"cut off, the first {broken[0]!r}; load another tag"
        )
    return manifest


def check_format(folder: Path, manifest: Any) -> None:
    """Checks that the manifest in `folder` can be read; to be called before any other use of it.

    Raises:
        ValueError: not a manifest; a newer format, whose other keys are unknown; a missing key; a file outside of the
            folder; a wrong checksum.
    """
    if not isinstance(manifest, dict) or type(manifest.get("format")) is not int:
        raise _damaged(folder, "must be a JSON object with a number 'format'")
    if manifest["format"] > FORMAT:
        raise ValueError(
            f"checkpoint {str(folder)!r} has format {manifest['format']}, this version reads up to {FORMAT}; "
            f"install the newer version that wrote it"
        )
    missing = [key for key in REQUIRED_KEYS if key not in manifest]
    if missing:
        raise _damaged(folder, f"has no {', '.join(missing)}")
    if not isinstance(manifest["files"], dict) or not isinstance(manifest["shapes"], dict):
        raise _damaged(folder, "lists its files or shapes in another form")
    if outside := [name for name in manifest["files"] if not is_inside(name)]:
        raise _damaged(folder, f"lists the file {outside[0]!r}, which is not in its folder")
    _check_own_checksum(folder, manifest)


def is_manifest(folder: Path) -> bool:
    """Whether `folder` has a manifest of ours, of any format."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and type(manifest.get("format")) is int and "files" in manifest


def list_files(folder: Path) -> list[str]:
    """Names of the files that the manifest of the checkpoint in `folder` lists."""
    files = json.loads((folder / MANIFEST).read_text())["files"]
    return [name for name in files if is_inside(name)]


def _check_own_checksum(folder: Path, manifest: dict[str, Any]) -> None:
    if manifest["format"] == WITHOUT_CHECKSUMS and "checksum" not in manifest:
        return
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    checksums = manifest.get("checksums")
    if manifest.get("checksum") != content_checksum(rest) or not isinstance(checksums, dict):
        raise _damaged(folder, "is not what was saved, its checksum differs")
    if checksums.keys() != manifest["files"].keys():
        raise _damaged(folder, "has no checksum of some files")


def _damaged(folder: Path, what: str) -> ValueError:
    return ValueError(f"checkpoint {str(folder)!r} is damaged: its manifest {what}; load another tag")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def check_folder(option: str, value: Any) -> Path:
    """`value` as a path; `option` is its name in error messages.

    Raises:
        ValueError: it is not a path, it is empty, or there is a file in its place.
    """
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or not isinstance(os.fspath(value), str):
        raise ValueError(f"{option}={value!r} must be the path of a folder, a string or a Path; e.g. 'checkpoints'")
    if "\0" in os.fspath(value):
        raise ValueError(f"{option}={value!r} must not hold a null character; e.g. 'checkpoints'")
    folder = Path(value)
    nearest = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if nearest is not None and not nearest.is_dir():
        raise ValueError(f"{option}={str(value)!r} must be a folder, and {str(nearest)!r} is a file; name another")
    return folder


def check_file_name(option: str, name: str) -> str:
    """`name`, if it is the plain name of a file.

    Raises:
        ValueError: it is a path outside of its folder, or not a valid file name.
    """
    if not isinstance(name, str) or not _is_plain(name):
        raise ValueError(
            f"{option}={name!r} must be the plain name of a file, without a folder and of at most {MAX_BYTES} bytes; "
            f"e.g. 'pytorch_model.bin', and the folder in the option that names the folder"
        )
    return name


def check_tag(tag: str) -> str:
    """`tag`, if it is a plain name of a folder.

    Raises:
        ValueError: it is hidden, "latest", or a path outside of the folder.
    """
    if not _is_plain(tag) or tag.startswith(".") or tag == LATEST:
        raise ValueError(
            f"tag={tag!r} must be a plain folder name, not hidden, not {LATEST!r} and of at most {MAX_BYTES} bytes; "
            f"e.g. 'global_step10'"
        )
    return tag


def is_inside(name: Any) -> bool:
    """Whether `name` is the name of a file directly in its folder, hidden or not."""
    return isinstance(name, str) and _is_plain(name)


def _is_plain(name: str) -> bool:
    separators = {"/", "\\", "\0", os.sep, os.altsep or "/"}
    has_path = name in ("", ".", "..") or any(separator in name for separator in separators)
    return not has_path and len(os.fsencode(name)) <= MAX_BYTES


def file_checksum(path: Path) -> str:
    """Checksum of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def content_checksum(content: Any) -> str:
    """Checksum of values that JSON can hold, independent of the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_files(folder: Path, checksums: Mapping[str, str], rank: int = 0, world_size: int = 1) -> None:
    """Compares the files assigned to `rank`, every `world_size`-th, with `checksums` by name.

    Raises:
        ValueError: one differs.
        OSError: one cannot be read.
    """
    for name in sorted(checksums)[rank::world_size]:
        if file_checksum(folder / name) != checksums[name]:
            raise ValueError(
                f"checkpoint {str(folder)!r} is damaged: {name} is not what was saved, its checksum differs; load "
                f"another tag"
            )
