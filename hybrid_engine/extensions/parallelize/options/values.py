"""Rules for values that users give: what each must be, in words, and the error for one that is not."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from hybrid_engine.distributed.processes import gather_objects

MOST_WORDS = 100
"""Characters of a value in an error: models and tensors are long."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
MOST_ALIKE = 30
"""Characters before the first difference of two long texts that an error shows."""


class Rule(NamedTuple):
    """What a value must be."""

    accepts: Callable[[Any], bool]
    words: str
    """They follow "must be"."""


def is_count(value: Any) -> bool:
    """Whether a value is a whole number of at least 1."""
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
    """Whether a value is a mapping whose keys are texts."""
    return isinstance(value, Mapping) and all(is_text(key) for key in value)


def is_list_of(value: Any, accepts: Callable[[Any], bool]) -> bool:
    """Whether a value is a list or tuple, each entry of which is accepted."""
    return isinstance(value, list | tuple) and all(accepts(entry) for entry in value)


def takes(function: Any, num_arguments: int) -> bool:
    """Whether `function` can be called with so many arguments, as far as it says."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except TypeError:
        return False
    except ValueError:
        return True  # of C, whose signature nobody knows
    return True


COUNT = Rule(is_count, "a number of at least 1")


SWITCH = Rule(is_switch, "True or False")


TEXT = Rule(is_text, "a text")


CALLABLE = Rule(callable, "a callable")


def check(name: str, value: Any, rule: Rule) -> None:
    """ValueError with the option, its value and the rule, unless the rule accepts the value."""
    if not rule.accepts(value):
        raise ValueError(f"{name}={shown(value)} must be {rule.words}")


def shown(value: Any) -> str:
    """A value in the words of an error, not longer than a line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MOST_WORDS else f"{text[:MOST_WORDS]}..."


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
