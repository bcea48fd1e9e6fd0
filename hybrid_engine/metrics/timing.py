"""Wall-clock times of training: milliseconds of each part of a step, and samples per second."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepTimers:
    """Milliseconds of forward, backward and step since the last `take()`; waits for the device around each."""

    PARTS = ("forward", "backward", "step")

    def __init__(self, device: torch.device, is_enabled: bool) -> None:
        self.device = device
        self.is_enabled = is_enabled
        self._seconds = dict.fromkeys(self.PARTS, 0.0)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Adds the time inside to `part`, also when it raises."""
        if not self.is_enabled:
            yield
            return
        start = self._now()
        try:
            yield
        finally:
            self._seconds[part] += self._now() - start

    def take(self) -> dict[str, float]:
        """Milliseconds by part; they count from 0 again."""
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
        """Says that an epoch ended; the next starts with no micro-batch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Says that a micro-batch begins."""
        if self._start is None:
            self._start = time.perf_counter()

    def stop(self, global_step: bool = False) -> None:
        """Says that a micro-batch ended, and whether an optimizer step with it."""
        self.micro_step_count += 1
        if not global_step or self._start is None:
            return
        self.global_step_count += 1
        if self.global_step_count > self.num_warmup_steps:
            self.total_elapsed_time += time.perf_counter() - self._start
        self._start = None

    def avg_samples_per_sec(self) -> float:
        """Over all processes; -1 before a step was counted, as in DeepSpeed."""
        num_steps = self.global_step_count - self.num_warmup_steps
        return num_steps * self.batch_size / self.total_elapsed_time if num_steps > 0 else -1.0
