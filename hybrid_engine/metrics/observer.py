"""Reports an engine's steps as its config requests: progress lines, times, operations and curves.

`ZeroEngine` calls an `Observer` around each pass and step. Curves are written by rank 0 through accelerate's trackers
and to CSV files by the `Monitor`, which is DeepSpeed's `engine.monitor`.
"""

import csv
import importlib.util
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.flop_counter import FlopCounterMode

from hybrid_engine.config import EngineConfig
from hybrid_engine.config.blocks import CometConfig, CsvMonitorConfig, FlopsProfilerConfig

Event = tuple[str, float, int]
"""Name, value and step."""
PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "comet": ("comet_ml",)}
"""Packages of each tracker, of which one must be installed."""


class SteppedOptimizer(Protocol):
    """The optimizer's numbers for a progress line, after a step."""

    param_groups: list[dict[str, Any]]
    grad_norm: float
    """The gradients' 2-norm, before clipping and without the loss scale."""

    @property
    def cur_scale(self) -> float:
        """The loss scale."""


class Counters(Protocol):
    """The counters of an engine and the sizes of its step; see `StepCounters` of `optim/accumulation.py`."""

    num_micro_batches: int
    global_steps: int
    global_samples: int
    skipped_steps: int
    loss_sum: torch.Tensor | None


class Observer:
    """Watches the forward passes, backward passes and steps of one engine."""

    def __init__(self, config: EngineConfig, device: torch.device, rank: int) -> None:
        self.config = config
        self.rank = rank
        self.timers = StepTimers(device, config.wall_clock_breakdown)
        self.flops = StepFlops(config.flops_profiler, device, is_writer=rank == 0)
        self.monitor = Monitor(config, rank)
        self.throughput = ThroughputTimer(config.train_batch_size)

    @contextmanager
    def forward(self, global_steps: int, is_training: bool) -> Iterator[None]:
        """Wraps a forward pass; a pass without gradients is not counted."""
        if not is_training or not torch.is_grad_enabled():
            yield
            return
        self.throughput.start()
        self.flops.start(global_steps)
        with self.timers.measure("forward"):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Wraps a backward pass that the engine starts."""
        with self.timers.measure("backward"):
            yield
        self.flops.stop()

    @contextmanager
    def step(self, is_boundary: bool) -> Iterator[None]:
        """Wraps the end of a micro-batch."""
        self.flops.stop()  # needed after a backward pass that PyTorch started
        with self.timers.measure("step"):
            yield
        self.throughput.stop(global_step=is_boundary)

    def finish_step(self, optimizer: SteppedOptimizer, counters: Counters) -> None:
        """Prints and writes what the config requests after an optimizer step; rank 0 only."""
        every = self.config.steps_per_print
        prints = self.rank == 0 and every > 0 and counters.global_steps % every == 0
        if not (prints or self.monitor.enabled):
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        line, events = f"step={counters.global_steps}", []
        if counters.loss_sum is not None:  # the loss is known only for backward passes that the engine starts
            loss = counters.loss_sum.item() / counters.num_micro_batches
            line += f" loss={loss:.6g}"
            events.append(("Train/Samples/train_loss", loss, counters.global_samples))
        if prints:
            print(
                f"{line} lr={rates} grad_norm={optimizer.grad_norm:.6g} loss_scale={optimizer.cur_scale:g} "
                f"skipped={counters.skipped_steps}",
                flush=True,
            )
        events.append(("Train/Samples/lr", rates[0], counters.global_samples))
        if self.config.fp16.enabled:
            events.append(("Train/Samples/loss_scale", optimizer.cur_scale, counters.global_samples))
        self.monitor.write_events(events)

    def print_times(self, global_steps: int) -> None:
        """Prints the milliseconds since the last line, on rank 0, if a progress line is due.

        Without `steps_per_print` every step has a line, because the times would not be visible otherwise.
        """
        every = self.config.steps_per_print or 1
        if not self.timers.is_enabled or global_steps % every:
            return
        parts = " ".join(f"{part}={milliseconds:.2f}" for part, milliseconds in self.timers.take().items())
        if self.rank == 0:
            print(f"step={global_steps} ms: {parts}", flush=True)


class StepTimers:
    """Milliseconds of forward, backward and step since the last `take()`; waits for the device around each."""

    PARTS = ("forward", "backward", "step")

    def __init__(self, device: torch.device, is_enabled: bool) -> None:
        self.device = device
        self.is_enabled = is_enabled
        self._seconds = dict.fromkeys(self.PARTS, 0.0)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Adds the time inside to `part`, also if it raises."""
        if not self.is_enabled:
            yield
            return
        start = self._now()
        try:
            yield
        finally:
            self._seconds[part] += self._now() - start

    def take(self) -> dict[str, float]:
        """Returns the milliseconds by part and resets them to 0."""
        taken = {part: 1000 * seconds for part, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(self.PARTS, 0.0)
        return taken

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class ThroughputTimer:
    """Samples per second over optimizer steps; DeepSpeed's `engine.tput_timer`.

    The first steps, which allocate and compile, are not counted.
    """

    def __init__(self, batch_size: int, num_warmup_steps: int = 2) -> None:
        self.batch_size = batch_size
        self.num_warmup_steps = num_warmup_steps
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._start: float | None = None

    def update_epoch_count(self) -> None:
        """Ends an epoch; the next one starts with no micro-batch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Starts a micro-batch."""
        if self._start is None:
            self._start = time.perf_counter()

    def stop(self, global_step: bool = False) -> None:
        """Ends a micro-batch; `global_step` is whether an optimizer step ends with it."""
        self.micro_step_count += 1
        if not global_step or self._start is None:
            return
        self.global_step_count += 1
        if self.global_step_count > self.num_warmup_steps:
            self.total_elapsed_time += time.perf_counter() - self._start
        self._start = None

    def avg_samples_per_sec(self) -> float:
        """Samples per second over all processes; -1 before a step was counted, as in DeepSpeed."""
        num_steps = self.global_step_count - self.num_warmup_steps
        return num_steps * self.batch_size / self.total_elapsed_time if num_steps > 0 else -1.0


class StepFlops:
    """Counts operations once, from `start()` before a forward pass to `stop()` after its backward pass.

    Operations are those of matrix products, convolutions and attention, as FlopCounterMode counts them.
    """

    def __init__(self, config: FlopsProfilerConfig, device: torch.device, is_writer: bool) -> None:
        """`is_writer`: whether this process writes; counting is local. The clock waits for `device`."""
        self.config = config
        self.device = device
        self.is_writer = is_writer
        self._counter: FlopCounterMode | None = None
        self._is_done = not config.enabled
        self._start = 0.0

    def start(self, step: int) -> None:
        """Starts counting if `step` is the one to profile."""
        if self._is_done or self._counter is not None or step != self.config.profile_step:
            return
        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()
        self._start = self._now()

    def stop(self) -> None:
        """Stops counting, if it had started, and writes the result."""
        if self._counter is None:
            return
        seconds = self._now() - self._start
        self._counter.__exit__(None, None, None)
        self._is_done = True
        if self.is_writer:
            self._write(self._describe(self._counter, seconds))
        self._counter = None

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _describe(self, counter: FlopCounterMode, seconds: float) -> str:
        total = counter.get_total_flops()
        head = (
            f"flops_profiler: step {self.config.profile_step}, one micro-batch forward and backward: {total} "
            f"operations in {seconds:.3f} s, {total / seconds:.3g} per second"
        )
        counts: dict[str, dict[Any, int]] = counter.get_flop_counts()
        by_module = {name: sum(ops.values()) for name, ops in counts.items() if name != "Global"}
        if self.config.detailed:
            shown = [entry for entry in by_module.items() if self._is_shown(entry[0])]
        else:
            shown = sorted(by_module.items(), key=lambda item: -item[1])[: self.config.top_modules]
        return "\n".join([head, *(f"  {count:>20,}  {name}" for name, count in shown)])

    def _is_shown(self, name: str) -> bool:
        return self.config.module_depth < 0 or name.count(".") <= self.config.module_depth

    def _write(self, text: str) -> None:
        if self.config.output_file is None:
            print(text, flush=True)
        else:
            Path(self.config.output_file).write_text(text + "\n")


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
