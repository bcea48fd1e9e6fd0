"""A field of options, and checks of options that several recipes share; `config/checks.py` checks single values."""

import math
from collections.abc import Sequence
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any

from hybrid_engine.config.checks import flag

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LARGEST_SEED = 2**63 - 1
LARGEST_ANSWERS = 2**20
"""Largest number of answers of a step: their prompts are chosen, and their tokens stored, before any is learned."""


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
