"""Seconds that a device spent on one kind of work, without waiting for it in between."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hybrid_engine.containers.streams import record_event


class Stopwatch:
    """Adds up the time inside `measure()`: by the device's own clock on CUDA, by the host's elsewhere."""

    def __init__(self, device: torch.device):
        self._device = device
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # those of work that may be under way
        self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measures what is started inside."""
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
        """The sum so far; waits for the device."""
        if self._events:
            self._events[-1][1].synchronize()
        self._add_finished()
        return self._seconds

    def _add_finished(self) -> None:
        """A batch that is served has turns without end, so events go as soon as their work is done."""
        while self._events and self._events[0][1].query():
            start, end = self._events.popleft()
            self._seconds += start.elapsed_time(end) / 1e3
