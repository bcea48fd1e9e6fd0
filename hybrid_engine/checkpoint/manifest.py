"""A checkpoint's manifest: what it holds, and the sizes and checksums of its files.

`format`, `files` (their sizes in bytes, by name), `checksums` (of the same files), `checksum` (of all the rest of the
manifest), and what `comparison.py` compares. A manifest of format 1 has no checksums and is read all the same.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_engine.checkpoint.checksums import content_checksum, file_checksum
from hybrid_engine.checkpoint.names import is_inside
from hybrid_engine.checkpoint.work_folder import MARK

MANIFEST = "checkpoint.json"
FORMAT = 2
WITHOUT_CHECKSUMS = 1
REQUIRED_KEYS = ("files", "shapes", "groups", "has_scheduler")


def write_manifest(folder: Path, content: Mapping[str, Any], checksums: Mapping[str, str]) -> None:
    """Writes the manifest of the checkpoint whose files are all in `folder`.

    `checksums` are those that are known already; files without one are read for theirs.
    """
    paths = sorted(path for path in folder.iterdir() if path.name != MARK)
    manifest = {
        **content,
        "format": FORMAT,
        "files": {path.name: path.stat().st_size for path in paths},
        "checksums": {path.name: checksums.get(path.name) or file_checksum(path) for path in paths},
    }
    # Tuples are lists from here on, as when it is read.
    manifest = json.loads(json.dumps(manifest))
    (folder / MANIFEST).write_text(json.dumps({**manifest, "checksum": content_checksum(manifest)}))


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `write_manifest` stored; the sizes of the files are those it says.

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
    """Whether the manifest in `folder` may be read at all; to be called before anything else in it is looked at.

    Raises:
        ValueError: not a manifest; a newer format, about whose other keys nothing is known; a missing key; a file
            outside of the folder; another checksum than its own.
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
    """The files of the checkpoint in `folder` that its manifest lists."""
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
