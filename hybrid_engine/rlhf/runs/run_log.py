"""Output of a run: progress, options, figures here and at trackers, samples, a plot. Rank 0 only."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hybrid_engine.checkpoint.saving import LOCK_FILE, FolderLock, lock_folder
from hybrid_engine.distributed.processes import get_rank
from hybrid_engine.rlhf.options.shared import RunOptions
from hybrid_engine.rlhf.runs.run_folder import (
    METRICS,
    TRACKER_PREFIX,
    flat_options,
    read_metrics,
    to_framework,
    write_config,
)

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


class RunLog:
    """Appends one JSON line per step to `metrics.jsonl` in `folder` and shows the figures next to a progress bar.

    The run's options are written to `config.yaml`; the trackers that they name get the figures too. Callers use our
    names of figures; the options may select another framework's names for the output (`run_folder.py`). Text that is
    printed meanwhile appears above the bar. If the output is not a terminal, each step has a line instead. Used as a
    context manager. On ranks other than 0 it does nothing.
    """

    def __init__(self, folder: Path, title: str, num_steps: int, config: RunOptions, first_step: int = 0):
        """Drops lines of steps from `first_step` on, which a run that was interrupted later has written.

        Raises:
            ValueError: a run of another process writes into `folder`.
        """
        self._is_writer = get_rank() == 0
        self._title, self._num_steps, self._first_step = title, num_steps, first_step
        self._folder, self._path, self._config = folder, folder / METRICS, config
        self._trackers: Trackers | None = None
        columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console()
        self._has_bar = self._is_writer and console.is_terminal
        figures = TextColumn("{task.fields[figures]}")
        self._progress = Progress(*columns, figures, console=console, disable=not self._has_bar)
        self._task = self._progress.add_task(title, total=num_steps, completed=first_step, figures="")
        if self._is_writer:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_run(folder)  # held for the lifetime of this log
            kept = [line for line in read_metrics(self._path) if line["step"] < first_step]
            write_config(folder, config)
            self._path.write_text("".join(self._json_line(line) for line in kept))

    def __enter__(self) -> "RunLog":
        if self._is_writer and self._config.tracker:
            options = flat_options(self._config)
            self._trackers = Trackers(self._config.tracker, self._folder, options, self._first_step)
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._trackers is not None:
            self._trackers.finish()

    def write(self, step: int, metrics: dict[str, Any], shown: Sequence[str] = ()) -> None:
        """Appends `metrics` of `step`, on disk when it returns, and shows those named in `shown`."""
        if not self._is_writer:
            return
        with self._path.open("a") as file:
            file.write(self._json_line({"step": step, **metrics}))
        if self._trackers is not None:
            prefix = TRACKER_PREFIX.get(self._config.metric_names or "", "")
            named = to_framework(metrics, self._config.metric_names)
            self._trackers.log(step, {prefix + name: value for name, value in named.items()})
        figures = "  ".join(f"{name} {metrics[name]:.3g}" for name in shown)
        if self._has_bar:
            self._progress.update(self._task, completed=step + 1, figures=figures)
        else:
            print(f"{self._title} {step + 1}/{self._num_steps}  {figures}", flush=True)

    def _json_line(self, figures: dict[str, Any]) -> str:
        return json.dumps(to_framework(figures, self._config.metric_names)) + "\n"


def say(message: str | Table) -> None:
    """Prints on rank 0."""
    if get_rank() == 0:
        console = Console()
        # In a file a sentence is one line, whatever width Rich assumes for the console there.
        console.print(
            message, markup=False, highlight=False, soft_wrap=isinstance(message, str) and not console.is_terminal
        )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes `content` as indented JSON on rank 0."""
    if get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")


def samples_table(title: str, columns: Mapping[str, Sequence[str]]) -> Table:
    """A table with one row per sample; `columns` maps a heading to the cells below it."""
    table = Table(title=title, show_lines=True)
    for heading in columns:
        table.add_column(heading, overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*(Text(cell) for cell in row))  # as it is: generated text may look like markup
    return table


def plot_metrics(metrics: list[dict[str, Any]], panels: Mapping[str, Sequence[str]], path: Path) -> None:
    """Saves a PNG with one panel per entry of `panels` (its title and the figures drawn in it) over the steps.

    A figure that was not measured, at a step or at all, is left out there.
    """
    if get_rank() != 0 or not metrics:
        return
    from matplotlib.figure import Figure  # without pyplot no window system and no global state is needed

    figure = Figure(figsize=(4.5 * len(panels), 3.5), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name in names:
            points = [(line["step"], line[name]) for line in metrics if name in line]
            if points:
                marker = "o" if len(points) < len(metrics) else None  # a line through few points hides them
                axes.plot(*zip(*points, strict=True), label=name.replace("_", " "), marker=marker)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(path, dpi=120)


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


def lock_run(folder: Path) -> FolderLock:
    """Keeps other processes' runs from writing into `folder`, which is there, for as long as the lock lives.

    Raises:
        ValueError: a run of another process writes there.
    """
    try:
        return lock_folder(folder)
    except ValueError as error:
        raise ValueError(
            f"--out: another run is writing into {str(folder)!r}; wait for it, stop it, or give another --out"
        ) from error


def check_not_running(folder: Path) -> None:
    """ValueError where a run of another process writes into `folder`, which need not be there."""
    if (folder / LOCK_FILE).exists():
        lock_run(folder)
