"""Checks of single options. Errors name the option as it is typed: `--max-new-tokens`, not `max_new_tokens`."""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

LARGEST_SEED = 2**63 - 1
LARGEST_COUNT = 10**9
"""Largest value of a count: more steps or rows than any run has, where the count itself takes no memory."""
LARGEST_ANSWERS = 2**20
"""Largest number of answers of a step: their prompts are chosen, and their tokens stored, before any is learned."""
LARGEST_COUNTS = {
    "rollout_size": LARGEST_ANSWERS,
    **dict.fromkeys(("group_size", "eval_samples", "num_samples", "k", "num_clients"), 4096),
    **dict.fromkeys(("max_prompt_tokens", "max_new_tokens", "max_tokens", "longest"), 2**24),
    **dict.fromkeys(("epochs", "ppo_epochs", "dynamic_sampling"), 10_000),
    **dict.fromkeys(("vocab_size", "max_waiting"), 2**20),
    "max_running": 2**16,
    "max_session_bytes": 2**38,
    "hidden_size": 2**14,
    "num_layers": 2**10,
}
"""Largest values of options that determine how much is stored in memory, or done, at once."""


def flag(name: str) -> str:
    """The command-line option for the field `name` of a recipe's `Config`."""
    return "--" + name.replace("_", "-")


def check_common(config: Any) -> None:
    """Checks options of every recipe that trains: no text is empty, and torch accepts the seed."""
    check_texts(config)
    check_between("seed", config.seed, 0, LARGEST_SEED)
    check_between("zero_stage", config.zero_stage, 0, 3)


def check_texts(config: Any) -> None:
    """Raises ValueError if a text among the options is empty."""
    for field in fields(config):
        value = getattr(config, field.name)
        if value == "" or (isinstance(value, tuple) and "" in value):
            raise ValueError(f"{flag(field.name)}='' is empty; give a value, or leave the option out")


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


def check_count(name: str, value: int | None, smallest: int) -> None:
    """Raises ValueError unless `value` of option `name` is an integer from `smallest` to its limit; None passes."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{flag(name)}={value!r} must be a whole number; give one")
    check_at_least(name, value, smallest)
    largest = LARGEST_COUNTS.get(name, LARGEST_COUNT)
    if value > largest:
        raise ValueError(f"{flag(name)}={value} must be at most {largest}; lower it")


def check_answers(rollout_size: int, group_size: int) -> None:
    """Raises ValueError if a step has more than `LARGEST_ANSWERS` answers."""
    if rollout_size * group_size > LARGEST_ANSWERS:
        raise ValueError(
            f"--rollout-size={rollout_size} times --group-size={group_size} makes {rollout_size * group_size} answers "
            f"of a step, which must be at most {LARGEST_ANSWERS}; lower one of them"
        )


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
