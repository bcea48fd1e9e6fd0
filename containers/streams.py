"""CUDA devices, events and captures of a process with several threads and several GPUs.

A thread starts on device 0, an event is recorded on the current device unless its stream is named, and PyTorch's stream
for captures is on the device where it was first used. All of it is named here: by the device of the tensors concerned.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

LAUNCHES = threading.RLock()
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
