"""Checks whether a checkpoint can be loaded, from its manifest and its plain values.

A manifest lists the contents of a checkpoint: `shapes` (of every weight and persistent buffer, by name), `left_out`
(the same of frozen parameters that are not in it), `tied` (the other names of tied parameters, with the first),
`groups` (the names of the trained parameters in each optimizer group; None without an optimizer), `has_scheduler` and
`scheduler` (its class), `optimizer` (its `class`, the names of its `options` and the values of its `defaults`; None
without one) and `pending_micro_batches` (the number since the last step, whose gradients are not in it). The oldest
checkpoints have no `left_out` and no `optimizer`, those of format 1 no `tied`, `scheduler`, `defaults` and
`pending_micro_batches`.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

logger = logging.getLogger("hybrid_engine")
MAX_NAMES_IN_ERROR = 10
VARYING = frozenset({"lr", "betas", "momentum"})
"""Options of a group that a schedule changes; the optimizer's defaults hold their initial values."""
UNIMPORTANT = frozenset({"params", "names", "initial_lr", "foreach", "fused", "capturable", "differentiable"})
"""Options that do not change the numbers."""
PROGRESS = frozenset({"last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "verbose"})
"""Entries that hold a schedule's position; so does every entry that begins with an underscore."""


class Wanted(NamedTuple):
    """The parts of a checkpoint that are loaded in addition to the weights."""

    training: bool
    """Counters, random states and the position in the data."""
    optimizer: bool
    """The optimizer's state, its groups and the loss scale."""
    scheduler: bool
    """The position of the schedule."""


def check_manifest(
    folder: Path, saved: dict[str, Any], own: dict[str, Any], wanted: Wanted, is_strict: bool = True
) -> None:
    """Compares the manifest of the checkpoint in `folder` with the one this engine would write.

    Unless `is_strict`, either side may have weights that the other does not have.

    Raises:
        ValueError: another model; another optimizer or other trained parameters, if their state is loaded; another
            scheduler or none, if its state is loaded.
    """
    _check_model(folder, saved["shapes"] | saved.get("left_out", {}), own["shapes"], is_strict)
    if wanted.optimizer:
        _check_training(folder, saved, own)
    if wanted.scheduler:
        _check_scheduler(folder, saved, own)


def warn_of_differences(
    folder: Path, saved: dict[str, Any], values: dict[str, Any], own: dict[str, Any], own_values: dict[str, Any]
) -> None:
    """Logs which options of the engine are replaced, because the checkpoint has other values.

    Args:
        folder: the checkpoint's.
        saved: its manifest.
        values: those of its plain values that are loaded.
        own: the manifest this engine would write.
        own_values: this engine's plain values.
    """
    found = []
    if "param_groups" in values:
        found += compare_optimizers(saved.get("optimizer") or {}, own["optimizer"])
        found += compare_groups(values["param_groups"], own_values["param_groups"])
    if "lr_scheduler" in values:
        found += compare_schedules(values["lr_scheduler"], own_values["lr_scheduler"])
    if found:
        logger.warning(
            "load_checkpoint(): %s was saved with other options, which are used from here on: %s. To use this run's "
            "own, set them after loading in engine.optimizer.param_groups, or load with load_optimizer_states=False "
            "and load_lr_scheduler_states=False",
            folder,
            "; ".join(found),
        )
    if saved.get("pending_micro_batches"):
        logger.warning(
            "load_checkpoint(): %s was saved within an accumulation: the gradients of the %d micro-batches since the "
            "last step are not in it, and the accumulation starts anew",
            folder,
            saved["pending_micro_batches"],
        )


def _check_model(folder: Path, saved: dict[str, list[int]], own: dict[str, list[int]], is_strict: bool) -> None:
    differences = []
    if is_strict:
        differences += [f"{name} is not in the model" for name in saved if name not in own]
        differences += [f"{name} is not in the checkpoint" for name in own if name not in saved]
    differences += [
        f"{name} has shape {own[name]} in the model and {saved[name]} in the checkpoint"
        for name in own
        if name in saved and own[name] != saved[name]
    ]
    if differences:
        shown = "; ".join(differences[:MAX_NAMES_IN_ERROR])
        raise ValueError(
            f"checkpoint {str(folder)!r} is of another model: {len(differences)} differences, the first: {shown}; "
            f"build the model with the configuration (and adapters) of the saved run"
        )


def _check_training(folder: Path, saved: dict[str, Any], own: dict[str, Any]) -> None:
    if saved["groups"] is None:
        raise ValueError(
            f"checkpoint {str(folder)!r} was saved without an optimizer and cannot continue a training; load it into "
            f"an engine without one, or with load_module_only=True"
        )
    if saved.get("optimizer") is not None:
        _check_optimizer(folder, saved["optimizer"], own["optimizer"])
    if saved["groups"] != own["groups"]:
        raise ValueError(
            f"checkpoint {str(folder)!r} trains other parameters, or in other groups: {_count(saved['groups'])} "
            f"there, {_count(own['groups'])} here; freeze and group them as in the saved run"
        )


def _check_scheduler(folder: Path, saved: dict[str, Any], own: dict[str, Any]) -> None:
    if saved["has_scheduler"] != own["has_scheduler"]:
        has = "a" if saved["has_scheduler"] else "no"
        raise ValueError(
            f"checkpoint {str(folder)!r} was saved with {has} learning-rate scheduler, the engine differs; give both "
            f"runs the same, or load with load_lr_scheduler_states=False"
        )
    if saved.get("scheduler", own["scheduler"]) != own["scheduler"]:
        raise ValueError(
            f"checkpoint {str(folder)!r} was saved with the learning-rate scheduler {saved['scheduler']}, the engine "
            f"has {own['scheduler']}, which cannot go on from its state; give both runs the same, or load with "
            f"load_lr_scheduler_states=False"
        )


def _check_optimizer(folder: Path, saved: dict[str, Any], own: dict[str, Any]) -> None:
    if saved["class"] != own["class"]:
        raise ValueError(
            f"checkpoint {str(folder)!r} was saved with the optimizer {saved['class']}, the engine has {own['class']}, "
            f"which cannot go on from its state; build the engine with {saved['class']}, or load with "
            f"load_optimizer_states=False"
        )
    if saved["options"] != own["options"]:
        raise ValueError(
            f"checkpoint {str(folder)!r} was saved with another optimizer {saved['class']}: its options are "
            f"{', '.join(saved['options'])}, the engine's {', '.join(own['options'])}; build the engine with the "
            f"optimizer (and its version) of the saved run"
        )


def _count(groups: list[list[str]]) -> str:
    return f"{sum(len(names) for names in groups)} in {len(groups)} group(s)"


def describe_optimizer(inner: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's class, the names of its options and their initial values."""
    # `defaults` are the options that every group has; the groups may hold more, such as a scheduler's `initial_lr`.
    defaults = {name: plain(value) for name, value in inner.defaults.items() if is_plain(plain(value))}
    return {"class": type(inner).__name__, "options": sorted(inner.defaults), "defaults": defaults}


def plain(value: Any) -> Any:
    """`value` in the form that JSON has for it."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def is_plain(value: Any) -> bool:
    """Whether JSON stores `value` and returns it unchanged."""
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def compare_optimizers(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Differences between the options that two optimizers were built with, from `describe_optimizer`."""
    defaults = saved.get("defaults", {})
    return _differences("", {name: defaults[name] for name in VARYING if name in defaults}, own["defaults"])


def compare_groups(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> list[str]:
    """Differences between the options of parameter groups, except those that a schedule changes."""
    found = []
    for number, (theirs, ours) in enumerate(zip(saved, own, strict=True)):
        where = f" of parameter group {number}" if len(own) > 1 else ""
        fixed = {name: value for name, value in theirs.items() if name not in VARYING | UNIMPORTANT}
        found += _differences(where, fixed, ours)
    return found


def compare_schedules(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Differences between two schedules of one class, except their positions."""
    fixed = {name: value for name, value in saved.items() if not name.startswith("_") and name not in PROGRESS}
    return _differences(" of the schedule", fixed, own)


def _differences(where: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}{where} is {plain(saved[name])} there and {plain(own[name])} here"
        for name in sorted(saved.keys() & own.keys())
        if is_plain(plain(saved[name])) and plain(saved[name]) != plain(own[name])
    ]
