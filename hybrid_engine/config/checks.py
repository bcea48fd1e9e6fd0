"""Checks of single options, with errors that name the option, its value, the rule and the remedy."""

import math
import os
import sys
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any


def check_integer(name: str, value: Any, minimum: int, maximum: float = math.inf) -> None:
    """Raises ValueError unless `value` is an integer (not a bool) in [minimum, maximum]."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ValueError(f"{name}={value!r} must be an integer {_limits(minimum, maximum)}; {_remedy(value)}")


def check_number(name: str, value: Any, minimum: float, maximum: float = math.inf) -> None:
    """Raises ValueError unless `value` is a finite number (not a bool) in [minimum, maximum]."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max or not minimum <= value <= maximum:
        raise ValueError(f"{name}={value!r} must be a finite number {_limits(minimum, maximum)}; {_remedy(value)}")


def whole_number(value: Any) -> Any:
    """A float without a fraction, which 1e5 is in JSON and Python, as an int; anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_flag(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false; write one of the two, without quotes")


def check_text(name: str, value: Any, is_optional: bool = False) -> None:
    """Raises ValueError unless `value` is a string, or None where that is allowed."""
    if not isinstance(value, str) and not (is_optional and value is None):
        raise ValueError(f"{name}={value!r} must be a string; write it in quotes")


def check_path_inside(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is the path of a folder below the one it is joined to."""
    check_text(name, value)
    if not value or value.startswith("/") or ".." in value.split("/"):
        raise ValueError(f'{name}={value!r} must stay in its folder, without ".." and not from the root; e.g. "my_run"')


def check_path(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a path that is not empty."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError(f"{name}={value!r} must be the path of a folder; give one as a string or a Path")


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raises ValueError unless `value` is one of `choices`, and of its type."""
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(str, choices))}; choose one of them")


def choose_type(path: str, kind: Any, known: Collection[str], not_supported: Collection[str] = ()) -> str:
    """The spelling in `known` of the type a user gave; like DeepSpeed, letter case does not matter."""
    if not isinstance(kind, str):
        raise ValueError(f"{path}.type={kind!r} must be one of {', '.join(known)}; write it as a string")
    by_lower_case = {name.lower(): name for name in known}
    if kind.lower() in by_lower_case:
        return by_lower_case[kind.lower()]
    if kind.lower() in [name.lower() for name in not_supported]:
        raise ValueError(f"{path}.type={kind!r} is not supported; use {', '.join(known)}, or pass an instance")
    close = find_nearest(kind, known)
    advice = f"did you mean {close}?" if close else f"use {' or '.join(known)}"
    raise ValueError(f"{path}.type={kind!r} is not known; {advice}")


def find_nearest(word: str, known: Collection[str], alike: float = 0.6) -> str | None:
    """The entry of `known` most like `word`, whatever its letter case; None when difflib's ratio is below `alike`."""
    by_lower_case = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), list(by_lower_case), n=1, cutoff=alike)
    return by_lower_case[close[0]] if close else None


def _limits(minimum: float, maximum: float) -> str:
    return f"of at least {minimum}" if maximum == math.inf else f"from {minimum} to {maximum}"


def _remedy(value: Any) -> str:
    if isinstance(value, str):
        return "write a number, without quotes"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "choose a number in that range" if is_number else "write a single number"
