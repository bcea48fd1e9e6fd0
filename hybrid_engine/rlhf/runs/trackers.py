"""Trackers that get a run's figures in addition to `metrics.jsonl`: those of accelerate, selected by `--tracker`."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PROJECT = "hybrid-engine"
_PLACES: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "tensorboard": lambda folder, step: {"run_name": "tensorboard", "logging_dir": folder, "purge_step": step},
    "wandb": lambda folder, step: {"run_name": os.environ.get("WANDB_PROJECT", PROJECT), "name": str(folder)},
    "mlflow": lambda folder, step: {"experiment_name": PROJECT, "run_name": str(folder)},
    "trackio": lambda folder, step: {"run_name": PROJECT, "name": str(folder)},
    "comet_ml": lambda folder, step: {"run_name": PROJECT},
    "clearml": lambda folder, step: {"project_name": PROJECT, "task_name": str(folder)},
    "aim": lambda folder, step: {"run_name": str(folder)},
    "dvclive": lambda folder, step: {"dir": str(folder / "dvclive"), "resume": step > 0},
    "swanlab": lambda folder, step: {"run_name": PROJECT, "experiment_name": str(folder)},
}
"""Arguments of accelerate's tracker class for a run in `folder` that starts at a step."""


class Trackers:
    """Passes the figures of each step to several trackers; for one process."""

    def __init__(self, names: Sequence[str], folder: Path, options: Mapping[str, Any], first_step: int) -> None:
        """Begins the run in `folder` at each tracker of `names`, which `check_trackers` has checked.

        Args:
            names: keys of `TRACKERS`.
            folder: the run's folder, which names the run at trackers.
            options: the run's options, which trackers show.
            first_step: the step at which the run resumes; 0 for a new one.
        """
        self._trackers = [_build_tracker(name, folder, first_step) for name in dict.fromkeys(names)]
        values = {name: _plain(value) for name, value in options.items()}
        for tracker in self._trackers:
            tracker.start()
            tracker.store_init_configuration(values)

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        """Logs the numbers among `figures`."""
        numbers = {name: value for name, value in figures.items() if isinstance(value, (int, float))}
        for tracker in self._trackers:
            tracker.log(numbers, step=step)

    def finish(self) -> None:
        """Ends the run at each tracker."""
        for tracker in self._trackers:
            tracker.finish()


def _build_tracker(name: str, folder: Path, first_step: int) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS  # a run without trackers does not need it

    return LOGGER_TYPE_TO_CLASS[name](**_PLACES[name](folder, first_step))


def _plain(value: Any) -> Any:
    """A list as text: trackers accept numbers, booleans and texts."""
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else value
