"""The folder of a run, `--out`: whether a run can write there, what an earlier one left, and setting that aside.

Nothing here deletes, and nothing needs torch: the command asks it what to say after Ctrl-C.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile

CHECKPOINTS = "checkpoints"
LATEST = "latest"
"""The file among a run's checkpoints that says which of them is complete; see `checkpoints.py`."""
BESIDE = ("config.yaml", "answers.jsonl", "tensorboard", "dvclive")
"""What a run writes before its first step: by itself it is no result."""
RUN_RESULTS = ("metrics.jsonl", CHECKPOINTS, "actor", "best", "plot.png", "samples.json", "result.json", *BESIDE)
"""What a recipe that is no stage of another leaves in the folder of its run."""
STAGES = ("sft", "reward")
"""Recipes that other recipes run first: each leaves a folder of its name, and others beside it."""
FOLDERS = (
    *(CHECKPOINTS, "actor", "best", "tensorboard", "dvclive"),
    *(f"{name}{more}" for name in STAGES for more in ("", "-log", "-best", "-checkpoints")),
)
"""Those names in the folder of a run that are folders; the others are files."""


def checkpoints_of(recipe: str) -> str:
    """The name of the folder with a recipe's checkpoints: a stage's stand beside those of the run that needs it."""
    return f"{recipe}-{CHECKPOINTS}" if recipe in STAGES else CHECKPOINTS


def results_of(recipe: str) -> tuple[str, ...]:
    """What a recipe leaves in the folder of its run."""
    return (recipe, f"{recipe}-log", f"{recipe}-best", checkpoints_of(recipe)) if recipe in STAGES else RUN_RESULTS


def check_out(out: str) -> Path:
    """The folder that `--out` names, which need not exist.

    Raises:
        ValueError: it could not be made or written to, or a name that a run writes to is taken by a file or a folder.
    """
    folder = Path(out)
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except (OSError, ValueError) as error:  # a name that is too long, or not one of a file
        raise ValueError(f"--out={out!r} cannot be a folder: {error}; choose another name") from error
    if not existing.is_dir():
        raise ValueError(f"--out={out!r} must be a folder, and {str(existing)!r} is a file; choose another name")
    try:
        with TemporaryFile(dir=existing):  # what permissions say is not the whole truth, for root or in /proc
            pass
    except OSError as error:
        raise ValueError(f"--out={out!r} cannot be written: {error.strerror}; choose another folder") from error
    for name in (*RUN_RESULTS, *FOLDERS):
        path, is_folder = folder / name, name in FOLDERS
        if path.exists() and path.is_dir() != is_folder:
            kinds = ("folder", "file") if is_folder else ("file", "folder")
            raise ValueError(f"--out={out!r}: {name} must be a {kinds[0]} and is a {kinds[1]}; move it away")
    return folder


def left_behind(folder: Path, names: Sequence[str]) -> list[str]:
    """Which of `names` an earlier run left in `folder`; a file without content is nothing, nor is `BESIDE`."""
    found = [folder / name for name in names if name not in BESIDE and (folder / name).exists()]
    return [path.name for path in found if path.is_dir() or path.stat().st_size > 0]


def has_checkpoint(folder: Path, recipe: str = "ppo") -> bool:
    """Whether the run of `recipe` in `folder` has a complete checkpoint."""
    return (folder / checkpoints_of(recipe) / LATEST).is_file()


def check_nothing_is_lost(folder: Path, recipe: str = "ppo") -> None:
    """Refuses to begin where an earlier run left its results, naming what there is to do."""
    found = left_behind(folder, results_of(recipe))
    if not found:
        return
    going_on = "--resume goes on with it, " if has_checkpoint(folder, recipe) else ""
    raise ValueError(
        f"--out={str(folder)!r} holds an earlier run ({', '.join(found)}): {going_on}--restart moves it aside and "
        f"begins again, another --out leaves it as it is"
    )


def check_can_resume(folder: Path, recipe: str = "ppo") -> None:
    """Refuses `--resume` without a complete checkpoint."""
    if has_checkpoint(folder, recipe):
        return
    found = left_behind(folder, results_of(recipe))
    none = f"--resume: {str(folder / checkpoints_of(recipe))!r} holds no complete checkpoint"
    if not found:
        raise ValueError(f"{none}; leave it out")
    raise ValueError(
        f"{none}; --restart begins again and moves what there is aside ({', '.join(found)}), and a run with "
        "--save-every 0 leaves no checkpoint"
    )


def set_aside(folder: Path, names: Sequence[str]) -> Path | None:
    """Moves `names` from `folder` to `previous-<n>` in it, the first that is free; None when there is nothing to move.

    For one process.
    """
    found = [name for name in names if (folder / name).exists()]
    if not found:
        return None
    number = 1
    while (folder / f"previous-{number}").exists():
        number += 1
    target = folder / f"previous-{number}"
    target.mkdir()
    for name in found:
        (folder / name).rename(target / name)
    return target
