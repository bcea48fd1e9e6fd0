"""The options of an optimizer and a schedule, as a checkpoint has them and as the engine was built with.

The checkpoint's are the ones a run goes on with, as in DeepSpeed; where they differ, the person who has just changed
one is told.
"""

from collections.abc import Mapping
from typing import Any

import torch

VARYING = frozenset({"lr", "betas", "momentum"})
"""Options of a group that a schedule changes; how they began is told by the optimizer's defaults."""
UNIMPORTANT = frozenset({"params", "names", "initial_lr", "foreach", "fused", "capturable", "differentiable"})
"""What does not change the numbers."""
PROGRESS = frozenset({"last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "verbose"})
"""Where a schedule stands; so does all that begins with an underscore."""


def describe_optimizer(inner: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's class, the names of its options and their values as it was built."""
    # `defaults` are the options that every group has; the groups may hold more, such as a scheduler's `initial_lr`.
    defaults = {name: plain(value) for name, value in inner.defaults.items() if is_plain(plain(value))}
    return {"class": type(inner).__name__, "options": sorted(inner.defaults), "defaults": defaults}


def plain(value: Any) -> Any:
    """`value` as JSON has it."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def is_plain(value: Any) -> bool:
    """Whether JSON holds it, and gives it back the same."""
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def compare_optimizers(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """What differs between the options two optimizers were built with, as `describe_optimizer` gives them."""
    defaults = saved.get("defaults", {})
    return _differences("", {name: defaults[name] for name in VARYING if name in defaults}, own["defaults"])


def compare_groups(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> list[str]:
    """What differs between the options of parameter groups, those apart that a schedule changes."""
    found = []
    for number, (theirs, ours) in enumerate(zip(saved, own, strict=True)):
        where = f" of parameter group {number}" if len(own) > 1 else ""
        fixed = {name: value for name, value in theirs.items() if name not in VARYING | UNIMPORTANT}
        found += _differences(where, fixed, ours)
    return found


def compare_schedules(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """What differs between two schedules of one class, their places in it apart."""
    fixed = {name: value for name, value in saved.items() if not name.startswith("_") and name not in PROGRESS}
    return _differences(" of the schedule", fixed, own)


def _differences(where: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}{where} is {plain(saved[name])} there and {plain(own[name])} here"
        for name in sorted(saved.keys() & own.keys())
        if is_plain(plain(saved[name])) and plain(saved[name]) != plain(own[name])
    ]
