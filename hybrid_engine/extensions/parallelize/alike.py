"""What the processes of a run must be given alike, in words that mean the same on each of them."""

import functools
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hybrid_engine.distributed.processes import gather_objects
from hybrid_engine.extensions.parallelize.values import MOST_WORDS

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
MOST_ALIKE = 30
"""Characters before the first difference of two long texts that an error shows."""


def name_of(function: Any) -> str:
    """A callable in words that are the same on every process and in every run; local."""
    if isinstance(function, functools.partial):
        arguments = [words_of(value) for value in function.args]
        arguments += [f"{name}={words_of(value)}" for name, value in sorted(function.keywords.items())]
        return f"partial({', '.join([name_of(function.func), *arguments])})"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def words_of(value: Any) -> str:
    """A value in words that are the same on every process; of tensors shape and dtype; local."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype}"
    if isinstance(value, Mapping):
        named = sorted((repr(name), words_of(entry)) for name, entry in value.items())
        return "{" + ", ".join(f"{name}: {words}" for name, words in named) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(words_of(entry) for entry in value)}]"
    return name_of(value) if callable(value) else ADDRESS.sub("", repr(value))


def words_by_name(option: str, entries: Mapping[str, Any]) -> dict[str, str]:
    """An option that is a dict in words: its names, and each of its entries; local."""
    each = {f"{option}[{name!r}]": words_of(entry) for name, entry in entries.items()}
    return {option: f"a dict of {sorted(entries)}", **each}


def check_alike(own: Mapping[str, str]) -> None:
    """ValueError on all processes unless all that have words of a thing have the same of it; collective.

    What some have no words of is not compared for them.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, found in enumerate(gather_objects(dict(own))):
        for name, words in found.items():
            other, expected = first.setdefault(name, (rank, words))
            if words != expected:
                one, two = _differing(expected, words)
                raise ValueError(
                    f"{name}={one} on rank {other} and {two} on rank {rank}; pass the same on all processes"
                )


def _differing(one: str, other: str) -> tuple[str, str]:
    """Two texts, not longer than a line, with the first difference in them."""
    if max(len(one), len(other)) <= MOST_WORDS:
        return one, other
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, same - MOST_ALIKE)
    cut = [text[start : start + MOST_WORDS] for text in (one, other)]
    return f"...{cut[0]}...", f"...{cut[1]}..."
