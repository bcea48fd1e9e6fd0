"""A field of a recipe's options: its default, and what `--help` says about it."""

from dataclasses import field
from typing import Any


def option(default: Any, text: str) -> Any:
    """A dataclass field with a default (a bool, number, text, tuple or None) and a description."""
    return field(default=default, metadata={"text": text})
