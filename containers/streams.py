"""CUDA devices, events and captures of a process with several threads and several GPUs.

A thread starts on device 0, an event is recorded on the current device unless its stream is named, and PyTorch's stream
for captures is on the device where it was first used. All of it is named here: by the device of the tensors concerned.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class FairLock:
    """A lock that its thread may take several times, and gets again only after those that waited for it meanwhile."""

    def __init__(self) -> None:
        self._turnstile, self._lock = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self) -> None:
        """Waits until no other thread has it."""
        thread = threading.get_ident()
        if self._owner != thread:  # no other thread can make it this one
            with self._turnstile:
                self._lock.acquire()
            self._owner = thread
        self._depth += 1

    def release(self) -> None:
        """Gives it back where it was taken first."""
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._lock.release()

    def let_others_in(self) -> None:
        """Lets those that wait have it first; does nothing where the thread has taken it more than once."""
        if self._depth == 1:
            self.release()
            self.acquire()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


LAUNCHES = FairLock()
"""Held while a CUDA graph is recorded, and by what draws from PyTorch's generator, which a capture has to itself.

Nothing waits for another thread inside of a capture, so that one lock for all devices cannot close a circle.
"""


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, `device` is the current one of this thread; does nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def launching(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, no thread records a graph; does nothing for a CPU. See `LAUNCHES`."""
    return LAUNCHES if device.type == "cuda" else nullcontext()


def record_event(device: torch.device, enable_timing: bool = False) -> torch.cuda.Event:
    """A new event after all that this thread has started on `device`."""
    event = torch.cuda.Event(enable_timing=enable_timing)
    event.record(torch.cuda.current_stream(device))
    return event


def send_to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values`, which the host made, on `device`; the host does not wait for what the device has to do before."""
    if device.type != "cuda":
        return values.to(device)
    # A pinned tensor of its own for each copy: the allocator keeps it until the copy is through.
    return values.pin_memory().to(device, non_blocking=True)
