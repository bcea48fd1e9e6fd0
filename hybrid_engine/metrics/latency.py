"""Breakdown of the time of an RLHF iteration, from one `eval()` to the next, and the clock of a rollout's phases.

The line is DeepSpeed's (deepspeed/runtime/hybrid_engine.py, `eval`). It differs where DeepSpeed's figures mislead: all
rollouts of an iteration count, Others does not include Gather, and samples are the generated ones.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hybrid_engine.containers.device import record_event


@dataclass
class Iteration:
    """Seconds and counts of one iteration; `num_samples` and `generated_tokens` are this process's."""

    start: float = field(default_factory=time.perf_counter)
    gather_seconds: float = 0.0
    generate_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    training_seconds: float = 0.0
    num_samples: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    reused_tokens: int = 0
    graph_captures: int = 0
    graph_capture_seconds: float = 0.0
    gathered_bytes: int = 0
    peak_kv_bytes: int = 0


class LatencyStats:
    """Collects an iteration's figures. `world_size` scales samples to all processes; clocks wait for a GPU `device`."""

    def __init__(self, world_size: int, device: torch.device):
        self.world_size, self.device = world_size, device
        self.iteration: Iteration | None = None
        self._training_mark: float | None = None
        self._total_seconds, self._total_samples = 0.0, 0

    def begin(self) -> str | None:
        """Ends the current iteration, if any, and starts the next; returns the line of the ended one."""
        line = None
        if self.iteration is not None:
            stats = self.stats()
            line = self._line(stats)
            self._total_seconds += stats["e2e_seconds"]
            self._total_samples += self.iteration.num_samples * self.world_size
        self.iteration = Iteration(self._now())
        self._training_mark = None
        return line

    def _now(self) -> float:
        """Time after the device has finished its work, which would otherwise count where the host next waits for it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Adds the time inside to the iteration's `<phase>_seconds`, and to no other phase's."""
        self.iteration = self.iteration or Iteration()
        start = self._now()
        try:
            yield
        finally:
            seconds = self._now() - start
            self.add(f"{phase}_seconds", seconds)
            if self._training_mark is not None:
                self._training_mark += seconds

    def add(self, figure: str, amount: float) -> None:
        """Adds to a figure of the iteration."""
        assert self.iteration is not None, "measure() and mark_training() begin it"
        setattr(self.iteration, figure, getattr(self.iteration, figure) + amount)

    def raise_peak(self, kv_bytes: int) -> None:
        """Raises the iteration's peak to the workspace's size, if that is larger."""
        assert self.iteration is not None, "measure() begins it"
        self.iteration.peak_kv_bytes = max(self.iteration.peak_kv_bytes, kv_bytes)

    def mark_training(self) -> None:
        """Starts the training time, at `train()`; before the first `eval()` this starts an iteration."""
        self.iteration = self.iteration or Iteration()
        self._training_mark = self._now()

    def add_training(self) -> None:
        """Adds the time since the last mark, at `step()`, and sets a new mark."""
        now = self._now()
        if self._training_mark is not None:
            self.add("training_seconds", now - self._training_mark)
        self.iteration = self.iteration or Iteration()
        self._training_mark = now

    def stats(self) -> dict[str, float]:
        """Returns the figures of the current iteration up to now; times in seconds."""
        iteration = self.iteration or Iteration()
        elapsed = self._now() - iteration.start
        busy = iteration.gather_seconds + iteration.generate_seconds + iteration.training_seconds
        samples = iteration.num_samples * self.world_size
        total_seconds = self._total_seconds + elapsed
        return {
            "e2e_seconds": elapsed,
            **{name: value for name, value in vars(iteration).items() if name != "start"},
            "others_seconds": max(elapsed - busy, 0.0),
            "samples_per_second": samples / elapsed,
            "average_samples_per_second": (self._total_samples + samples) / total_seconds,
            "tokens_per_second": iteration.generated_tokens / max(iteration.generate_seconds, 1e-9),
        }

    def _line(self, stats: dict[str, float]) -> str:
        def share(name: str) -> str:
            return f"{stats[name] / stats['e2e_seconds'] * 100:.2f}%"

        line = (
            f"|E2E latency={stats['e2e_seconds']:.2f}s "
            f"|Gather latency={stats['gather_seconds']:.2f}s ({share('gather_seconds')}) "
            f"|Generate time={stats['generate_seconds']:.2f}s ({share('generate_seconds')}) "
            f"|Training time={stats['training_seconds']:.2f}s ({share('training_seconds')}) "
            f"|Others={stats['others_seconds']:.2f} ({share('others_seconds')})"
        )
        if stats["num_samples"] == 0:
            return line
        return (
            f"{line}|CurSamplesPerSec={stats['samples_per_second']:.2f} "
            f"|AvgSamplesPerSec={stats['average_samples_per_second']:.2f}"
        )


class Stopwatch:
    """Adds up the time inside `measure()`, by the device's clock on CUDA and by the host's elsewhere."""

    def __init__(self, device: torch.device):
        self._device = device
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # events of unfinished work
        self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measures the work that is started in the context."""
        if self._device.type == "cuda":
            self._add_finished()
            start = record_event(self._device, enable_timing=True)
            yield
            self._events.append((start, record_event(self._device, enable_timing=True)))
        else:
            start_seconds = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start_seconds

    def seconds(self) -> float:
        """Returns the sum so far; waits for the device."""
        if self._events:
            self._events[-1][1].synchronize()
        self._add_finished()
        return self._seconds

    def _add_finished(self) -> None:
        """Adds events whose work is done, at every measurement, because a server's batch takes turns without end."""
        while self._events and self._events[0][1].query():
            start, end = self._events.popleft()
            self._seconds += start.elapsed_time(end) / 1e3
