"""Whether a checkpoint may be loaded, decided from its manifest alone.

A manifest says what a checkpoint holds: `format`, `files` (their sizes in bytes, by name), `shapes` (of every weight
and persistent buffer, by name), `left_out` (the same of frozen parameters that are not in it; absent in the oldest
checkpoints), `groups` (the names of the trained parameters in each optimizer group; None without an
optimizer), `has_scheduler` and `optimizer` (its `class` and the names of its `options`; None without one, absent in
the oldest checkpoints).
"""

import logging
from pathlib import Path
from typing import Any

from hybrid_engine.zero.processes import gather_objects

logger = logging.getLogger("hybrid_engine")

FORMAT = 1
REQUIRED_KEYS = ("files", "shapes", "groups", "has_scheduler")
MAX_NAMES_IN_ERROR = 10


def choose_tag(tag: str | int | None, validation: str) -> str | int | None:
    """The tag of rank 0, compared with the others' as `checkpoint.tag_validation` says; collective.

    Raises:
        ValueError: they differ and `validation` is "Fail".
    """
    tags = gather_objects(tag)
    if validation == "Ignore" or all(other == tags[0] for other in tags):
        return tags[0]
    message = f"save_checkpoint(): the processes give different tags, {tags}; give all of them the same"
    if validation == "Fail":
        raise ValueError(f"{message} (checkpoint.tag_validation is Fail)")
    logger.warning("%s; that of rank 0 is used", message)
    return tags[0]


def check_format(folder: Path, manifest: Any) -> None:
    """Whether the manifest in `folder` may be read at all; to be called before anything else in it is looked at.

    Raises:
        ValueError: not a manifest; a newer format, about whose other keys nothing is known; a missing key.
    """
    if not isinstance(manifest, dict) or type(manifest.get("format")) is not int:
        raise ValueError(
            f"checkpoint {str(folder)!r} is damaged: its manifest must be a JSON object with a number 'format'; load "
            f"another tag"
        )
    if manifest["format"] > FORMAT:
        raise ValueError(
            f"checkpoint {str(folder)!r} has format {manifest['format']}, this version reads up to {FORMAT}; "
            f"install the newer version that wrote it"
        )
    missing = [key for key in REQUIRED_KEYS if key not in manifest]
    if missing or not isinstance(manifest["files"], dict):
        what = f"has no {', '.join(missing)}" if missing else "lists its files in another shape"
        raise ValueError(f"checkpoint {str(folder)!r} is damaged: its manifest {what}; load another tag")


def check_manifest(folder: Path, saved: dict[str, Any], own: dict[str, Any], is_strict: bool = True) -> None:
    """Compares the manifest of the checkpoint in `folder` with the one this engine would write.

    Unless `is_strict`, either side may have weights that the other has not.

    Raises:
        ValueError: another model; another optimizer, other trained parameters or no scheduler, if
            this engine trains.
    """
    _check_model(folder, saved["shapes"] | saved.get("left_out", {}), own["shapes"], is_strict)
    if own["groups"] is not None:
        _check_training(folder, saved, own)


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
            f"an engine without one"
        )
    if "optimizer" in saved:
        _check_optimizer(folder, saved["optimizer"], own["optimizer"])
    if saved["groups"] != own["groups"]:
        raise ValueError(
            f"checkpoint {str(folder)!r} trains other parameters, or in other groups: {_count(saved['groups'])} "
            f"there, {_count(own['groups'])} here; freeze and group them as in the saved run"
        )
    if saved["has_scheduler"] != own["has_scheduler"]:
        has = "a" if saved["has_scheduler"] else "no"
        raise ValueError(
            f"checkpoint {str(folder)!r} was saved with {has} learning-rate scheduler, the engine differs; give both "
            f"runs the same"
        )


def _check_optimizer(folder: Path, saved: dict[str, Any], own: dict[str, Any]) -> None:
    if saved["class"] != own["class"]:
        raise ValueError(
            f"checkpoint {str(folder)!r} was saved with the optimizer {saved['class']}, the engine has {own['class']}, "
            f"which cannot go on from its state; build the engine with {saved['class']}"
        )
    if saved["options"] != own["options"]:
        raise ValueError(
            f"checkpoint {str(folder)!r} was saved with another optimizer {saved['class']}: its options are "
            f"{', '.join(saved['options'])}, the engine's {', '.join(own['options'])}; build the engine with the "
            f"optimizer (and its version) of the saved run"
        )


def _count(groups: list[list[str]]) -> str:
    return f"{sum(len(names) for names in groups)} in {len(groups)} group(s)"
