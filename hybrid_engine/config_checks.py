"""Checks of single options, with errors that name the option, its value, the rule and the remedy."""

import math
from typing import Any


def check_integer(name: str, value: Any, minimum: int, maximum: float = math.inf) -> None:
    """Raises ValueError unless `value` is an integer (not a bool) in [minimum, maximum]."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ValueError(f"{name}={value!r} must be an integer {_limits(minimum, maximum)}; {_remedy(value)}")


def check_number(name: str, value: Any, minimum: float, maximum: float = math.inf) -> None:
    """Raises ValueError unless `value` is a finite number (not a bool) in [minimum, maximum]."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not minimum <= value <= maximum:
        raise ValueError(f"{name}={value!r} must be a finite number {_limits(minimum, maximum)}; {_remedy(value)}")


def check_flag(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false; write one of the two, without quotes")


def _limits(minimum: float, maximum: float) -> str:
    return f"of at least {minimum}" if maximum == math.inf else f"from {minimum} to {maximum}"


def _remedy(value: Any) -> str:
    if isinstance(value, str):
        return "write a number, without quotes"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "choose a number in that range" if is_number else "write a single number"
