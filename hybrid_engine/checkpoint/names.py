"""Names that a caller gives for folders and for files in them: what is written stays where it was asked for."""

import os
from pathlib import Path
from typing import Any

LATEST = "latest"
MAX_BYTES = 200
"""Of a name; file systems take 255, and some names here get a few characters more."""


def check_folder(option: str, value: Any) -> Path:
    """`value` as a path; `option` is what the caller calls it.

    Raises:
        ValueError: it is no path, empty, or a file is in its place.
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
        ValueError: it would leave its folder, or no file can have it.
    """
    if not isinstance(name, str) or not _is_plain(name):
        raise ValueError(
            f"{option}={name!r} must be the plain name of a file, without a folder and of at most {MAX_BYTES} bytes; "
            f"e.g. 'pytorch_model.bin', and the folder in the option that names the folder"
        )
    return name


def check_tag(tag: str) -> str:
    """`tag`, if it is the name of a folder of its own.

    Raises:
        ValueError: it is hidden, "latest", or would leave the folder.
    """
    if not _is_plain(tag) or tag.startswith(".") or tag == LATEST:
        raise ValueError(
            f"tag={tag!r} must be a plain folder name, not hidden, not {LATEST!r} and of at most {MAX_BYTES} bytes; "
            f"e.g. 'global_step10'"
        )
    return tag


def is_inside(name: Any) -> bool:
    """Whether `name` is that of a file directly in its folder, hidden or not."""
    return isinstance(name, str) and _is_plain(name)


def _is_plain(name: str) -> bool:
    separators = {"/", "\\", "\0", os.sep, os.altsep or "/"}
    has_path = name in ("", ".", "..") or any(separator in name for separator in separators)
    return not has_path and len(os.fsencode(name)) <= MAX_BYTES
