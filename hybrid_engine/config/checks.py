"""Checks of single options, with errors that name the option, its value, the rule and the remedy.

The first ones are for keys of a config and arguments of functions. Those from `flag` on are for options of the command,
whose errors name the option as it is typed: `--max-new-tokens`, not `max_new_tokens`. `DTYPES` is the one table of the
names of dtypes. No module of torch is imported, except by `torch_dtype_of`.
"""

import math
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Names of the dtypes in configs and options, and in torch."""
_DTYPE_NAMES = {"float": "fp32", "half": "fp16", **{name: name for name in DTYPES}, **{v: k for k, v in DTYPES.items()}}
LARGEST_COUNT = 10**9
"""Largest count of the command: more steps or rows than any run has. A typing error is refused before it takes
memory."""
LARGEST_SIZE = 2**38
"""Largest size of the command, in bytes."""
LARGEST_SEED = 2**63 - 1
LARGEST_ANSWERS = 2**20
"""Largest number of answers of a step: their prompts are chosen, and their tokens stored, before any is learned."""


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
        raise ValueError(f'{name}={value!r} must be a relative path without ".."; e.g. "my_run"')


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


def dtype_name(value: Any) -> str | None:
    """The key of `DTYPES` for a dtype of torch or one of its names, also after "torch."; None if there is none."""
    return _DTYPE_NAMES.get(str(value).lower().removeprefix("torch."))


def torch_dtype_of(name: str) -> "torch.dtype":
    """The dtype of torch for a key of `DTYPES`."""
    import torch

    return getattr(torch, DTYPES[name])  # type: ignore[no-any-return]


def flag(name: str) -> str:
    """The command-line option for the field `name` of a recipe's `Config`."""
    return "--" + name.replace("_", "-")


def check_finite(name: str, value: float) -> None:
    """Raises ValueError if `value` of option `name` is infinite or not a number."""
    if not math.isfinite(value):
        raise ValueError(f"{flag(name)}={value} must be finite; give a number")


def check_at_least(name: str, value: float | None, smallest: float) -> None:
    """Raises ValueError unless `value` of option `name` is finite and at least `smallest`; None passes."""
    if value is None:
        return
    check_finite(name, value)
    if value < smallest:
        raise ValueError(f"{flag(name)}={value} must be at least {smallest}; raise it")


def check_count(name: str, value: int | None, smallest: int, largest: int = LARGEST_COUNT) -> None:
    """Raises ValueError unless `value` of option `name` is an integer in [smallest, largest]; None passes."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{flag(name)}={value!r} must be a whole number; give one")
    check_at_least(name, value, smallest)
    if value > largest:
        raise ValueError(f"{flag(name)}={value} must be at most {largest}; lower it")


def check_above(name: str, value: float | None, bound: float) -> None:
    """Raises ValueError unless `value` of option `name` is finite and above `bound`; None passes."""
    if value is None:
        return
    check_finite(name, value)
    if value <= bound:
        raise ValueError(f"{flag(name)}={value} must be above {bound}; raise it")


def check_between(name: str, value: float, smallest: float, largest: float) -> None:
    """Raises ValueError unless `value` of option `name` is from `smallest` to `largest`, both included."""
    if not smallest <= value <= largest:
        raise ValueError(f"{flag(name)}={value} must be from {smallest} to {largest}; choose a number in that range")


def check_divides(name: str, value: int, divisor: int) -> None:
    """Raises ValueError unless `value` of option `name` is a positive multiple of `divisor`."""
    if value < 1 or value % divisor:
        raise ValueError(
            f"{flag(name)}={value} must be a positive multiple of {divisor}; "
            f"use {-(-max(value, 1) // divisor) * divisor}"
        )


def check_one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises ValueError unless `value` of option `name` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{flag(name)}={value} must be one of {', '.join(choices)}; choose one of them")


def option(default: Any, text: str) -> Any:
    """A dataclass field with a default (a bool, number, text, tuple or None) and a description for `--help`."""
    return field(default=default, metadata={"text": text})


def check_texts(config: "DataclassInstance") -> None:
    """Raises ValueError if a text among the options is empty."""
    for entry in fields(config):
        value = getattr(config, entry.name)
        if value == "" or (isinstance(value, tuple) and "" in value):
            raise ValueError(f"{flag(entry.name)}='' is empty; give a value, or leave the option out")


def check_budget_holds(budget: int, largest: int, longest: int) -> None:
    """Raises ValueError if a pass of `--tokens-per-micro-batch` does not hold what is learned from.

    Args:
        budget: tokens of a pass; 0 has no limit.
        largest: tokens of the largest thing that is learned from, with its padding.
        longest: tokens of its longest sequence.
    """
    if budget and largest > budget:
        raise ValueError(
            f"--tokens-per-micro-batch={budget} must hold the largest training example, {largest} tokens (its longest "
            f"sequence has {longest}); raise it to {largest} or more, or shorten the sequences"
        )


def check_answers(rollout_size: int, group_size: int) -> None:
    """Raises ValueError if a step has more than `LARGEST_ANSWERS` answers."""
    if rollout_size * group_size > LARGEST_ANSWERS:
        raise ValueError(
            f"--rollout-size={rollout_size} times --group-size={group_size} makes {rollout_size * group_size} answers "
            f"per step, which must be at most {LARGEST_ANSWERS}; lower one of them"
        )


def check_weights(num_rewards: int, weights: Sequence[float] | None) -> Sequence[float]:
    """A weight for each reward; ValueError if some are missing or not finite, or all are 0."""
    if weights is None:
        return [1.0] * num_rewards
    shown = " ".join(f"{weight:g}" for weight in weights)
    if len(weights) != num_rewards:
        raise ValueError(f"--reward-weights={shown!r} must be {num_rewards} numbers, one for each --reward")
    if not all(map(math.isfinite, weights)) or not any(weights):
        raise ValueError(f"--reward-weights={shown!r} must be finite and not all 0; give other numbers")
    return weights
