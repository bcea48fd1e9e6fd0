"""Curves of a run, written by rank 0 through accelerate's trackers and to CSV files; DeepSpeed's `engine.monitor`."""

import csv
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accelerate.tracking import CometMLTracker, GeneralTracker, TensorBoardTracker, WandBTracker

from hybrid_engine.config import EngineConfig
from hybrid_engine.config.observing import CometConfig, CsvMonitorConfig

Event = tuple[str, float, int]
"""Name, value and step."""
PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "comet": ("comet_ml",)}
"""What each tracker needs one of."""


class CsvTracker(GeneralTracker):
    """One file for each quantity, `<output_path>/<job_name>/<name, with _ for />.csv`, with rows of step and value."""

    name = "csv"
    requires_logging_directory = True

    def __init__(self, config: CsvMonitorConfig) -> None:
        super().__init__()
        self.folder = Path(config.output_path) / config.job_name

    @property
    def tracker(self) -> Path:
        """The folder."""
        return self.folder

    def start(self) -> None:
        """Makes the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)

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
    """Hands events to the trackers that the config switches on; without any, or on another rank, to none."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        self.trackers = _build_trackers(config) if rank == 0 else []
        for tracker in self.trackers:
            tracker.start()
        if config.comet.enabled and config.comet.experiment_name and rank == 0:
            self.trackers[-1].tracker.set_name(config.comet.experiment_name)

    @property
    def enabled(self) -> bool:
        """Whether anybody listens."""
        return bool(self.trackers)

    def write_events(self, events: Iterable[Event]) -> None:
        """Writes `(name, value, step)` tuples."""
        for name, value, step in events:
            for tracker in self.trackers:
                tracker.log({name: value}, step=step)


def check_packages(config: EngineConfig) -> None:
    """Raises ValueError for a tracker that is switched on and whose package is not installed."""
    for name, packages in PACKAGES.items():
        found = any(importlib.util.find_spec(package) for package in packages)
        if getattr(config, name).enabled and not found:
            raise ValueError(
                f"{name}.enabled=true needs the package {packages[0]}, which is not installed; install it, or use "
                f"csv_monitor"
            )


def _build_trackers(config: EngineConfig) -> list[GeneralTracker]:
    trackers: list[GeneralTracker] = []
    if config.tensorboard.enabled:
        trackers.append(TensorBoardTracker(config.tensorboard.job_name, config.tensorboard.output_path or "."))
    if config.csv_monitor.enabled:
        trackers.append(CsvTracker(config.csv_monitor))
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
