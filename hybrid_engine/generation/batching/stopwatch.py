"""Seconds that a device spent on one kind of work, without waiting for it in between."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the time inside `measure()`: by the device's own clock on CUDA, by the host's elsewhere."""

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measures what is started inside."""
        if self._is_cuda:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self._events.append(events)
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def seconds(self) -> float:
        """The sum so far; waits for the device."""
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1e3
        self._events.clear()
        return self._seconds
