"""Rules for values that users give: what each must be, in words, and the error for one that is not."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

MOST_WORDS = 100
"""Characters of a value in an error: models and tensors are long."""


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
