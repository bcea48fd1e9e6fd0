"""Checkpoints of a run: all of its engines under one tag, with all other state that a bitwise resume needs.

An engine's checkpoint holds weights, optimizer, scheduler and every random state. A recipe adds in `state` the values
that its loop passes from step to step (an adaptive coefficient, a buffer of prompts). It derives everything else, such
as the order of its data, from the step alone. The loop of a recipe:

    engines = {"critic": critic, "actor": actor}
    saved = load_checkpoints(engines, folder, config) if config.resume else SavedRun()
    for step in range(saved.step, num_steps):
        ...
        if is_due(config.save_every, step, num_steps):
            save_checkpoints(engines, folder, step + 1, config, {"kl_coef": kl_coef})
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import PeftModel

from hybrid_engine.checkpoint.folder import discard
from hybrid_engine.config.checks import flag
from hybrid_engine.distributed.processes import get_world_size, init_distributed, on_rank_zero
from hybrid_engine.rlhf.options.reinforcement import PPOConfig
from hybrid_engine.rlhf.options.shared import LENGTHS, AnswerOptions, TrainingOptions, TrainingT, fit_minibatch
from hybrid_engine.rlhf.runs.engine_config import (
    AUTO,
    DEFAULT_TYPE,
    EARLIER_TYPE,
    WITHOUT_WARMUP,
    apply_tf32,
    choose_dtype,
)
from hybrid_engine.rlhf.runs.run_folder import LATEST, STAGES, check_can_resume, checkpoints_of
from hybrid_engine.rlhf.runs.run_log import check_not_running, say

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OPTIONS = "options.json"
"""The options of the run, next to its checkpoints: they can be compared before any model is loaded."""
FINISHED = "finished.json"
"""Name of a file in a stage's log with the number of steps or passes that its saved model was trained for."""
_MAY_DIFFER = frozenset({"out", "resume", "restart", "save_every", "eval_every", "eval_prompts", "tracker"})

_EARLIER = {"lr_scheduler_type": EARLIER_TYPE, "dtype": "fp32"}
"""Values of options for runs that began before the option existed."""
_OTHER_DEFAULT = ("missing_eos_score",)
"""Options of PPO that had another default: a resumed run keeps the value that it began with."""
_OPEN = (None, AUTO, 0)
"""Values of options that a run replaces as it begins."""
"""Options for the length of a run, of which the first that a recipe has counts: `--resume` may raise it."""


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """The state of an interrupted run; the defaults are the beginning of a run."""

    step: int = 0
    """Number of steps that were done."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The state that the recipe passed to `save_checkpoints`."""


def begin_run(config: TrainingT, recipe: str) -> TrainingT:
    """Joins the processes of a run of `recipe`; returns its options with open values replaced, as they are stored.

    A resumed run keeps the values that it began with; if it began before an option existed, it keeps the earlier
    behavior. Other open lengths are set when the data is read (`data/prompts.py`). Collective.
    """
    init_distributed()
    apply_tf32(config)
    folder = Path(config.out) / checkpoints_of(recipe)
    saved = on_rank_zero(lambda: _read_options(folder)) if config.resume else None
    config = fit_minibatch(config, get_world_size(), (saved or {}).get(config.UPDATE))
    found: dict[str, Any] = {"lr_scheduler_type": DEFAULT_TYPE, "dtype": choose_dtype(AUTO)}
    if saved is not None:
        found = {name: saved.get(name, _EARLIER[name]) for name in found}
        kept = [*(LENGTHS if isinstance(config, AnswerOptions) else ())]
        kept += _OTHER_DEFAULT if isinstance(config, PPOConfig) else ()
        found |= {name: saved[name] for name in kept if name in saved}
    return replace(config, **{name: value for name, value in found.items() if getattr(config, name) in _OPEN})


def save_checkpoints(
    engines: Mapping[str, Any], folder: Path, step: int, config: TrainingOptions, state: Mapping[str, Any] | None = None
) -> None:
    """Saves `engines` after `step` steps, each in a folder with its name, and then removes older tags; collective.

    The checkpoint is valid once all of it is on disk: the file `latest` in `folder`, written last, names its step.

    Args:
        engines: what is trained, by names of folders; the same at every call of a run.
        folder: of all checkpoints of the run.
        step: number of steps that are done.
        config: the recipe's options, a dataclass; a run can only be resumed with the same options.
        state: other state of the loop, the same on every process: numbers, strings, lists, dicts and tensors.
    """
    tag, saved = f"step{step}", {"step": step, "config": _options(config), "state": dict(state or {})}
    on_rank_zero(lambda: _write(folder / OPTIONS, json.dumps(_options(config), indent=2) + "\n"))
    for name, engine in engines.items():
        is_adapted = isinstance(engine.module, PeftModel)  # its base is available wherever the run is resumed
        engine.save_checkpoint(folder / name, tag, saved, save_latest=False, exclude_frozen_parameters=is_adapted)

    def finish() -> None:
        _write(folder / LATEST, str(step))
        for name in engines:
            for path in (folder / name).glob("step*"):
                discard(path.parent, path.name, tag)

    on_rank_zero(finish)


def load_checkpoints(engines: Mapping[str, Any], folder: Path, config: TrainingOptions) -> SavedRun:
    """Loads the last checkpoint into `engines`, with every random state; collective.

    If the run is longer now, the learning rates are those of its schedule at this step over the new length.

    Raises:
        ValueError: there is no checkpoint, or it was written with other options.
    """
    tag = f"step{int((folder / LATEST).read_text())}" if (folder / LATEST).is_file() else None
    saved: dict[str, Any] = {}
    for name, engine in engines.items():
        schedule = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
        _, saved = engine.load_checkpoint(folder / name, tag)
        _check_options(saved["config"], config)
        if schedule is not None and _is_longer(saved["config"], config):
            _lengthen(name, engine, schedule, config)
    say(f"Continuing after step {saved['step']}")
    return SavedRun(step=saved["step"], state=saved["state"])


def is_lengthened(config: TrainingOptions, recipe: str) -> bool:
    """Whether `--resume` makes the run of the stage `recipe` longer than its saved model's; collective.

    The options next to the checkpoints are not sufficient: a longer run that was interrupted has its new length there,
    while the model is still the earlier one.
    """
    saved = on_rank_zero(lambda: _read_finished(config, recipe)) if config.resume else None
    return saved is not None and _is_longer(saved, config)


def mark_finished(config: TrainingOptions, recipe: str) -> None:
    """Records how long the saved model of the stage `recipe` was trained; collective."""
    on_rank_zero(lambda: _write_finished(config, recipe))


def _write_finished(config: TrainingOptions, recipe: str) -> None:
    finished = {config.LENGTH: config.run_length}
    _write(Path(config.out) / f"{recipe}-log" / FINISHED, json.dumps(finished) + "\n")


def _read_finished(config: TrainingOptions, recipe: str) -> dict[str, Any] | None:
    """The length of the run that produced the model of a stage.

    Earlier versions wrote only its options, which a longer run overwrites, so the length is stored before that.
    """
    path = Path(config.out) / f"{recipe}-log" / FINISHED
    if path.is_file():
        return dict(json.loads(path.read_text()))
    saved = _read_options(Path(config.out) / checkpoints_of(recipe))
    if saved is not None and (Path(config.out) / recipe).exists():
        _write_finished(_of_length(config, saved), recipe)
    return saved


def _is_longer(saved: dict[str, Any], config: TrainingOptions) -> bool:
    return config.run_length > _of_length(config, saved).run_length


def _of_length(config: TrainingOptions, saved: Mapping[str, Any]) -> TrainingOptions:
    """`config` with the length of the run whose options are `saved`."""
    length: dict[str, Any] = {config.LENGTH: saved.get(config.LENGTH)}
    return replace(config, **length)


def _lengthen(name: str, engine: Any, schedule: dict[str, Any], config: TrainingOptions) -> None:
    """Sets `engine` to where its new, longer `schedule` is after as many steps."""
    scheduler = engine.lr_scheduler
    before = engine.get_lr()[0]
    scheduler.load_state_dict(schedule | {"last_epoch": scheduler.last_epoch - 1, "_step_count": scheduler._step_count})
    scheduler.step()
    if config.lr_scheduler_type != WITHOUT_WARMUP:
        option, kind = config.LENGTH, config.lr_scheduler_type
        say(
            f"{flag(option)}={config.run_length} makes the run longer: the {kind} schedule of the {name} is now "
            f"over all of it, and its learning rate goes on at {engine.get_lr()[0]:.3g}, after {before:.3g}; figures "
            f"are not those of a run that was as long from the start, as with --lr-scheduler-type={WITHOUT_WARMUP}"
        )


def check_resume(folder: Path, config: TrainingOptions, recipe: str) -> None:
    """Checks that `--resume` can continue the run of `recipe` in `folder`; for one process.

    Raises:
        ValueError: another run still writes there, `--restart` is given too, there is no complete checkpoint, or it was
            written with other options.
    """
    check_not_running(folder / f"{recipe}-log" if recipe in STAGES else folder)
    if config.resume and config.restart:
        raise ValueError("--resume continues a run and --restart starts it over; give one of them")
    if config.resume:
        check_can_resume(folder, recipe)
        check_saved_options(folder / checkpoints_of(recipe), config)


def check_saved_options(folder: Path, config: TrainingOptions) -> None:
    """Checks that the run with checkpoints in `folder` had the same options: as `load_checkpoints` does, but early.

    Raises:
        ValueError: naming the first option that differs.
    """
    if (saved := _read_options(folder)) is not None:
        _check_options(saved, config)


def _read_options(folder: Path) -> dict[str, Any] | None:
    """The options of the run whose checkpoints are in `folder`; None if there are none."""
    return json.loads((folder / OPTIONS).read_text()) if (folder / OPTIONS).is_file() else None


def _options(config: TrainingOptions) -> dict[str, Any]:
    """Every option by name as JSON reads it back; options of a group are not nested."""
    flat: dict[str, Any] = {}
    for name, value in asdict(config).items():
        flat |= value if isinstance(value, dict) else {name: value}
    return json.loads(json.dumps(flat))


def _unset(config: "DataclassInstance") -> dict[str, Any]:
    """The options that have a default, as JSON reads it back; those of a group by its type."""
    flat: dict[str, Any] = {}
    for option in fields(config):
        value = getattr(config, option.name)
        if is_dataclass(value) and not isinstance(value, type):
            flat |= _unset(value)
        elif option.default is not MISSING:
            flat[option.name] = option.default
        elif option.default_factory is not MISSING:
            flat[option.name] = option.default_factory()
    return json.loads(json.dumps(flat))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    writing = path.with_name(f".{path.name}")
    writing.write_text(text)
    writing.replace(path)


def _check_options(saved: dict[str, Any], config: TrainingOptions) -> None:
    given, unset, length = _options(config), _unset(config), config.LENGTH
    for name in sorted(given.keys() - _MAY_DIFFER):
        if name not in saved and given[name] == _EARLIER.get(name, unset.get(name)):
            continue  # saved before the option existed
        if name not in saved:
            raise ValueError(
                f"--resume: {flag(name)}={given[name]!r} but the interrupted run is from a version without this "
                f"option; a run continues with its original options: leave {flag(name)} out"
            )
        if saved[name] != given[name] and not (name == length and _is_longer(saved, config)):
            is_unset = saved[name] is None or saved[name] is False
            remedy = f"leave {flag(name)} out" if is_unset else f"use the original {flag(name)}"
            more = ", or more for a longer run" if name == length else ""
            raise ValueError(
                f"--resume: {flag(name)}={given[name]!r} but the interrupted run had {saved.get(name)!r}; "
                f"a run continues with its original options: {remedy}{more}"
            )
