"""Rules for values that users pass, and the errors for values that break them.

`arguments.py`, `compute_config.py` and the checks of policy options use these.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from hybrid_engine.distributed.processes import gather_objects

MOST_WORDS = 100
"""Maximum number of characters of a value in an error: models and tensors are long."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
MOST_ALIKE = 30
"""Characters that an error shows before the first difference of two long texts."""


class Rule(NamedTuple):
    """A check of a value and its description for the error."""

    accepts: Callable[[Any], bool]
    words: str
    """The text after "must be"."""


def is_count(value: Any) -> bool:
    """Whether a value is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and value - value == 0


def is_text(value: Any) -> bool:
    """Whether a value is a str."""
    return isinstance(value, str)


def is_switch(value: Any) -> bool:
    """Whether a value is True or False."""
    return isinstance(value, bool)


def has_names(value: Any) -> bool:
    """Whether a value is a mapping whose keys are strings."""
    return isinstance(value, Mapping) and all(is_text(key) for key in value)


def is_list_of(value: Any, accepts: Callable[[Any], bool]) -> bool:
    """Whether a value is a list or tuple whose entries are all accepted."""
    return isinstance(value, list | tuple) and all(accepts(entry) for entry in value)


def takes(function: Any, num_arguments: int) -> bool:
    """Whether `function` can be called with this number of arguments; True if its signature is unknown."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except TypeError:
        return False
    except ValueError:
        return True  # a C function without a signature
    return True


COUNT = Rule(is_count, "a number of at least 1")


SWITCH = Rule(is_switch, "True or False")


TEXT = Rule(is_text, "a text")


CALLABLE = Rule(callable, "a callable")


def check(name: str, value: Any, rule: Rule) -> None:
    """Raises ValueError with the option, its value and the rule, unless the rule accepts the value."""
    if not rule.accepts(value):
        raise ValueError(f"{name}={shown(value)} must be {rule.words}")


def shown(value: Any) -> str:
    """A value as an error shows it, cut to one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MOST_WORDS else f"{text[:MOST_WORDS]}..."


def name_of(function: Any) -> str:
    """A name for a callable that is the same on every process and in every run; local."""
    if isinstance(function, functools.partial):
        arguments = [words_of(value) for value in function.args]
        arguments += [f"{name}={words_of(value)}" for name, value in sorted(function.keywords.items())]
        return f"partial({', '.join([name_of(function.func), *arguments])})"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def words_of(value: Any) -> str:
    """A description of a value that is the same on every process; shape and dtype for a tensor; local."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype}"
    if isinstance(value, Mapping):
        named = sorted((repr(name), words_of(entry)) for name, entry in value.items())
        return "{" + ", ".join(f"{name}: {words}" for name, words in named) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(words_of(entry) for entry in value)}]"
    return name_of(value) if callable(value) else ADDRESS.sub("", repr(value))


def words_by_name(option: str, entries: Mapping[str, Any]) -> dict[str, str]:
    """Descriptions of an option that is a dict: one of its names, and one of each entry; local."""
    each = {f"{option}[{name!r}]": words_of(entry) for name, entry in entries.items()}
    return {option: f"a dict of {sorted(entries)}", **each}


def check_alike(own: Mapping[str, str]) -> None:
    """Raises ValueError on all processes unless all those that describe a name describe it alike; collective.

    A process that does not describe a name is not compared for it.
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
    """Excerpts of two texts, each at most one line, that contain the first difference."""
    if max(len(one), len(other)) <= MOST_WORDS:
        return one, other
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, same - MOST_ALIKE)
    cut = [text[start : start + MOST_WORDS] for text in (one, other)]
    return f"...{cut[0]}...", f"...{cut[1]}..."
