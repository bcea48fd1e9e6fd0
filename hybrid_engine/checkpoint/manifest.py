"""A checkpoint's manifest, which lists its contents and the sizes and checksums of its files, and its comparisons.

Keys: `format`, `files` (their sizes in bytes, by name), `checksums` (of the same files), `checksum` (of the rest of the
manifest), and those that `check_manifest` compares with the engine before a load. A manifest of format 1 has no
checksums and can still be read. Also here: the checks of names of files, folders and tags.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

MANIFEST = "checkpoint.json"
MARK = ".written_by_hybrid_engine"
"""A file that marks a folder as one that is being written here; see `folder.py`."""
FORMAT = 2
WITHOUT_CHECKSUMS = 1
REQUIRED_KEYS = ("files", "shapes", "groups", "has_scheduler")
LATEST = "latest"
MAX_BYTES = 200
"""Maximum length of a name; file systems allow 255, and some names here get a few more characters."""
CHUNK_BYTES = 1 << 22
logger = logging.getLogger("hybrid_engine")
MAX_NAMES_IN_ERROR = 10
VARYING = frozenset({"lr", "betas", "momentum"})
"""Options of a group that a schedule changes; the optimizer's defaults hold their initial values."""
UNIMPORTANT = frozenset({"params", "names", "initial_lr", "foreach", "fused", "capturable", "differentiable"})
"""Options that do not change the numbers."""
PROGRESS = frozenset({"last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "verbose"})
"""Entries that hold a schedule's position; so does every entry that begins with an underscore."""


def write_manifest(folder: Path, content: Mapping[str, Any], checksums: Mapping[str, str]) -> None:
    """Writes the manifest of the checkpoint whose files are all in `folder`.

    `checksums` are those that are known already; the others are computed from the files.
    """
    paths = sorted(path for path in folder.iterdir() if path.name != MARK)
    manifest = {
        **content,
        "format": FORMAT,
        "files": {path.name: path.stat().st_size for path in paths},
        "checksums": {path.name: checksums.get(path.name) or file_checksum(path) for path in paths},
    }
    # Turns tuples into lists, as they are when it is read.
    manifest = json.loads(json.dumps(manifest))
    (folder / MANIFEST).write_text(json.dumps({**manifest, "checksum": content_checksum(manifest)}))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest that `write_manifest` stored, after a check of the sizes of the files.

    Raises:
        ValueError: a newer format, a damaged manifest, or an incomplete checkpoint: a file is missing or has another
            size than when it was written.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"checkpoint {str(folder)!r} is incomplete: {MANIFEST} is missing; load another tag")
    try:
        manifest = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"checkpoint {str(folder)!r} is damaged: {MANIFEST} is not JSON; load another tag") from error
    check_format(folder, manifest)
    broken = [name for name, size in manifest["files"].items() if _size(folder / name) != size]
    if broken:
        raise ValueError(
            f"checkpoint {str(folder)!r} is incomplete: {len(broken)} of {len(manifest['files'])} files are missing or "
            f"cut off, the first {broken[0]!r}; load another tag"
        )
    return manifest


def check_format(folder: Path, manifest: Any) -> None:
    """Checks that the manifest in `folder` can be read; to be called before any other use of it.

    Raises:
        ValueError: not a manifest; a newer format, whose other keys are unknown; a missing key; a file outside of the
            folder; a wrong checksum.
    """
    if not isinstance(manifest, dict) or type(manifest.get("format")) is not int:
        raise _damaged(folder, "must be a JSON object with a number 'format'")
    if manifest["format"] > FORMAT:
        raise ValueError(
            f"checkpoint {str(folder)!r} has format {manifest['format']}, this version reads up to {FORMAT}; "
            f"install the newer version that wrote it"
        )
    missing = [key for key in REQUIRED_KEYS if key not in manifest]
    if missing:
        raise _damaged(folder, f"has no {', '.join(missing)}")
    if not isinstance(manifest["files"], dict) or not isinstance(manifest["shapes"], dict):
        raise _damaged(folder, "lists its files or shapes in another form")
    if outside := [name for name in manifest["files"] if not is_inside(name)]:
        raise _damaged(folder, f"lists the file {outside[0]!r}, which is not in its folder")
    _check_own_checksum(folder, manifest)


def is_manifest(folder: Path) -> bool:
    """Whether `folder` has a manifest of ours, of any format."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and type(manifest.get("format")) is int and "files" in manifest


def list_files(folder: Path) -> list[str]:
    """Names of the files that the manifest of the checkpoint in `folder` lists."""
    files = json.loads((folder / MANIFEST).read_text())["files"]
    return [name for name in files if is_inside(name)]


def _check_own_checksum(folder: Path, manifest: dict[str, Any]) -> None:
    if manifest["format"] == WITHOUT_CHECKSUMS and "checksum" not in manifest:
        return
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    checksums = manifest.get("checksums")
    if manifest.get("checksum") != content_checksum(rest) or not isinstance(checksums, dict):
        raise _damaged(folder, "is not what was saved, its checksum differs")
    if checksums.keys() != manifest["files"].keys():
        raise _damaged(folder, "has no checksum of some files")


def _damaged(folder: Path, what: str) -> ValueError:
    return ValueError(f"checkpoint {str(folder)!r} is damaged: its manifest {what}; load another tag")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def check_folder(option: str, value: Any) -> Path:
    """`value` as a path; `option` is its name in error messages.

    Raises:
        ValueError: it is not a path, it is empty, or there is a file in its place.
    """
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or not isinstance(os.fspath(value), str):
        raise ValueError(f"{option}={value!r} must be the path of a folder, a string or a Path; e.g. 'checkpoints'")
    if "\0" in os.fspath(value):
        raise ValueError(f"{option}={value!r} must not hold a null character; e.g. 'checkpoints'")
    folder = Path(value)
    nearest = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if nearest is not None and not nearest.is_dir():
        raise ValueError(f"{option}={str(value)!r} must be a folder, and {str(nearest)!r} is a file; name another")
    return folder


def check_file_name(option: str, name: str) -> str:
    """`name`, if it is the plain name of a file.

    Raises:
        ValueError: it is a path outside of its folder, or not a valid file name.
    """
    if not isinstance(name, str) or not _is_plain(name):
        raise ValueError(
            f"{option}={name!r} must be the plain name of a file, without a folder and of at most {MAX_BYTES} bytes; "
            f"e.g. 'pytorch_model.bin', and the folder in the option that names the folder"
        )
    return name


def check_tag(tag: str) -> str:
    """`tag`, if it is a plain name of a folder.

    Raises:
        ValueError: it is hidden, "latest", or a path outside of the folder.
    """
    if not _is_plain(tag) or tag.startswith(".") or tag == LATEST:
        raise ValueError(
            f"tag={tag!r} must be a plain folder name, not hidden, not {LATEST!r} and of at most {MAX_BYTES} bytes; "
            f"e.g. 'global_step10'"
        )
    return tag


def is_inside(name: Any) -> bool:
    """Whether `name` is the name of a file directly in its folder, hidden or not."""
    return isinstance(name, str) and _is_plain(name)


def _is_plain(name: str) -> bool:
    separators = {"/", "\\", "\0", os.sep, os.altsep or "/"}
    has_path = name in ("", ".", "..") or any(separator in name for separator in separators)
    return not has_path and len(os.fsencode(name)) <= MAX_BYTES


def file_checksum(path: Path) -> str:
    """Checksum of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def content_checksum(content: Any) -> str:
    """Checksum of values that JSON can hold, independent of the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_files(folder: Path, checksums: Mapping[str, str], rank: int = 0, world_size: int = 1) -> None:
    """Compares the files assigned to `rank`, every `world_size`-th, with `checksums` by name.

    Raises:
        ValueError: one differs.
        OSError: one cannot be read.
    """
    for name in sorted(checksums)[rank::world_size]:
        if file_checksum(folder / name) != checksums[name]:
            raise ValueError(
                f"checkpoint {str(folder)!r} is damaged: {name} is not what was saved, its checksum differs; load "
                f"another tag"
            )


class PartsToLoad(NamedTuple):
    """The parts of a checkpoint that are loaded in addition to the weights."""

    training: bool
    """Counters, random states and the position in the data."""
    optimizer: bool
    """The optimizer's state, its groups and the loss scale."""
    scheduler: bool
    """The position of the schedule."""


def check_manifest(
    folder: Path, saved: dict[str, Any], own: dict[str, Any], wanted: PartsToLoad, is_strict: bool = True
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
            "last step are not in it, and the accumulation starts again",
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
            f"checkpoint {str(folder)!r} was saved without an optimizer and cannot continue training; load it into "
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
            f"has {own['scheduler']}, which cannot continue from its state; give both runs the same, or load with "
            f"load_lr_scheduler_states=False"
        )


def _check_optimizer(folder: Path, saved: dict[str, Any], own: dict[str, Any]) -> None:
    if saved["class"] != own["class"]:
        raise ValueError(
            f"checkpoint {str(folder)!r} was saved with the optimizer {saved['class']}, the engine has {own['class']}, "
            f"which cannot continue from its state; build the engine with {saved['class']}, or load with "
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
