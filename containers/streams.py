"""CUDA devices, events and captures of a process with several threads and several GPUs.

A thread starts on device 0, an event is recorded on the current device unless its stream is named, and PyTorch's
capture stream is on the device where it was first used. Functions here take the device explicitly.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class FairLock:
    """A reentrant lock; a thread that releases it gets it again only after the threads that waited for it."""

    def __init__(self) -> None:
        self._turnstile, self._lock = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self) -> None:
        """Waits until no other thread holds the lock."""
        thread = threading.get_ident()
        if self._owner != thread:  # no other thread can set it to this one
            with self._turnstile:
                self._lock.acquire()
            self._owner = thread
        self._depth += 1

    def release(self) -> None:
        """Releases the lock if this is the outermost `release`."""
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._lock.release()

    def let_others_in(self) -> None:
        """Lets waiting threads take the lock first; does nothing if this thread holds it more than once."""
        if self._depth == 1:
            self.release()
            self.acquire()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


LAUNCHES = FairLock()
"""Held while a CUDA graph is recorded, and while code draws from PyTorch's generator, which a capture needs for itself.

No thread waits for another inside a capture, so one lock for all devices cannot cause a deadlock.
"""


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, `device` is this thread's current device; does nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def launching(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, no thread records a graph; does nothing for a CPU. See `LAUNCHES`."""
    return LAUNCHES if device.type == "cuda" else nullcontext()


def record_event(device: torch.device, enable_timing: bool = False) -> torch.cuda.Event:
    """Records a new event after all work that this thread has started on `device`."""
    event = torch.cuda.Event(enable_timing=enable_timing)
    event.record(torch.cuda.current_stream(device))
    return event


def send_to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies host `values` to `device`; the host does not wait for earlier work of the device."""
    if device.type != "cuda":
        return values.to(device)
    # Each copy has a pinned tensor of its own, which the allocator keeps until the copy is done.
    return values.pin_memory().to(device, non_blocking=True)
