"""Curves of a run, written by rank 0 through accelerate's trackers and to CSV files; DeepSpeed's `engine.monitor`."""

import csv
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from hybrid_engine.config import EngineConfig
from hybrid_engine.config.blocks import CometConfig, CsvMonitorConfig

Event = tuple[str, float, int]
"""Name, value and step."""
PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "comet": ("comet_ml",)}
"""Packages of each tracker, of which one must be installed."""


class Tracker(Protocol):
    """Destination of curves: the part of accelerate's `GeneralTracker` that is used here."""

    @property
    def tracker(self) -> Any:
        """The object or path that the curves are written with or to."""

    def start(self) -> None:
        """Called once, before the first value."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Writes values by the name of their quantity."""


class CsvTracker:
    """One file per quantity, `<output_path>/<job_name>/<name, with _ for />.csv`, with rows of step and value."""

    def __init__(self, config: CsvMonitorConfig) -> None:
        self.folder = Path(config.output_path) / config.job_name

    @property
    def tracker(self) -> Path:
        """The folder of the files."""
        return self.folder

    def start(self) -> None:
        """Does nothing: `prepare_outputs` has created the folder."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Appends one row to the file of each quantity."""
        for name, value in values.items():
            path = self.folder / f"{name.replace('/', '_')}.csv"
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.writer(file)
                if is_new:
                    writer.writerow(["step", name])
                writer.writerow([step, value])


class Monitor:
    """Sends events to the trackers that the config enables; on ranks other than 0, to none."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        self.trackers = _build_trackers(config) if rank == 0 else []
        for tracker in self.trackers:
            tracker.start()
        if config.comet.enabled and config.comet.experiment_name and rank == 0:
            self.trackers[-1].tracker.set_name(config.comet.experiment_name)

    @property
    def enabled(self) -> bool:
        """Whether there is a tracker."""
        return bool(self.trackers)

    def write_events(self, events: Iterable[Event]) -> None:
        """Writes `(name, value, step)` tuples."""
        for name, value, step in events:
            for tracker in self.trackers:
                tracker.log({name: value}, step=step)


def check_packages(config: EngineConfig) -> None:
    """Raises ValueError for an enabled tracker whose package is not installed."""
    for name, packages in PACKAGES.items():
        found = any(importlib.util.find_spec(package) for package in packages)
        if getattr(config, name).enabled and not found:
            raise ValueError(
                f"{name}.enabled=true needs the package {packages[0]}, which is not installed; install it, or use "
                f"csv_monitor"
            )


def prepare_outputs(config: EngineConfig) -> None:
    """Creates the folders that rank 0 will write to.

    Raises:
        ValueError: one cannot be created or written, or `flops_profiler.output_file` is a folder.
    """
    for name, block in (("tensorboard", config.tensorboard), ("csv_monitor", config.csv_monitor)):
        if block.enabled:
            _make_folder(f"{name}.output_path", block.output_path, Path(block.output_path) / block.job_name)
    path = config.flops_profiler.output_file
    if config.flops_profiler.enabled and path is not None:
        if Path(path).is_dir():
            raise ValueError(f"flops_profiler.output_file={path!r} is a folder; give a file in it")
        _make_folder("flops_profiler.output_file", path, Path(path).parent)


def _make_folder(option: str, value: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK)
    except OSError:
        is_writable = False
    if not is_writable:
        raise ValueError(f"{option}={value!r} cannot be written: no folder {str(folder)!r} can be; give another path")


def _build_trackers(config: EngineConfig) -> list[Tracker]:
    trackers: list[Tracker] = [CsvTracker(config.csv_monitor)] if config.csv_monitor.enabled else []
    if not (config.tensorboard.enabled or config.wandb.enabled or config.comet.enabled):
        return trackers
    # Imported here, not at the top: a run without such curves does not need accelerate.
    from accelerate.tracking import CometMLTracker, TensorBoardTracker, WandBTracker

    if config.tensorboard.enabled:
        trackers.append(TensorBoardTracker(config.tensorboard.job_name, config.tensorboard.output_path or "."))
    if config.wandb.enabled:
        options = {"group": config.wandb.group, "entity": config.wandb.team}
        trackers.append(WandBTracker(config.wandb.project, **_given(options)))
    if config.comet.enabled:
        trackers.append(CometMLTracker(config.comet.project, **_comet_options(config.comet)))
    return trackers


def _comet_options(config: CometConfig) -> dict[str, Any]:
    names = ("workspace", "api_key", "experiment_key", "online", "mode")
    return _given({name: getattr(config, name) for name in names})


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
