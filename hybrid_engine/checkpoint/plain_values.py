"""Values that are no tensors of the model: stored with torch, and read back without running pickled code."""

import io
from pathlib import Path
from typing import Any

import torch

STATE_FILE = "state.pt"


def serialize(values: dict[str, Any]) -> bytes:
    """`values` as the bytes of a file.

    Raises:
        ValueError: a part cannot be stored, or not read back without running code; it says which.
    """
    for name, value in values.items():
        if not _is_storable(value):
            path, part = _find_unstorable(name, value, outer=(value,))
            raise ValueError(
                f"{path} holds a {type(part).__name__}, which cannot be stored, or not read back without running "
                f"code; use numbers, strings, lists, dicts and tensors only"
            )
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def read_values(folder: Path) -> dict[str, Any]:
    """What was serialized to the checkpoint in `folder`.

    Raises:
        ValueError: it is damaged.
        OSError: it cannot be read.
    """
    serialized = (folder / STATE_FILE).read_bytes()
    try:
        values = torch.load(io.BytesIO(serialized), weights_only=True, map_location="cpu")
    # Garbled bytes make torch raise nearly anything: UnpicklingError, RuntimeError, KeyError, UnicodeDecodeError, ...
    except Exception as error:
        raise _damaged(folder) from error
    if not isinstance(values, dict):
        raise _damaged(folder)
    return values


def _damaged(folder: Path) -> ValueError:
    return ValueError(f"checkpoint {str(folder)!r} is damaged: {STATE_FILE} cannot be read; load another tag")


def _is_storable(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    # Pickling runs the object's own code: a lambda raises AttributeError, a lock TypeError, others what they like.
    except Exception:
        return False
    return True


def _find_unstorable(path: str, value: Any, outer: tuple[Any, ...]) -> tuple[str, Any]:
    """The innermost part of `value` that cannot be stored, and where it is; `outer` are the parts around it."""
    children: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        children = [(key, part) for key, child in value.items() for part in (key, child)]
    elif isinstance(value, (list, tuple)):
        children = list(enumerate(value))
    for key, child in children:
        if not any(child is part for part in outer) and not _is_storable(child):
            return _find_unstorable(f"{path}[{key!r}]", child, (*outer, child))
    return path, value
