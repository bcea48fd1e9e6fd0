"""Ctrl-C: delays it until a section that must not stop halfway is finished, and restores modes after it.

Python raises KeyboardInterrupt between any two lines, including between the halves of a step and in the `finally` that
would clean up. Signal handlers run in the main thread only; in other threads there is nothing to delay.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

INSISTS_AFTER = 1.0
"""Seconds after which another Ctrl-C is not delayed; torchrun passes the first one on at once, a second time."""


class HeldInterrupts:
    """A Ctrl-C that came inside `holding_interrupts()` and is delayed until its end."""

    def __init__(self) -> None:
        self._previous: Any = None
        self._since: float | None = None

    def begin(self) -> None:
        """Delays Ctrl-C from here on, if the handler is one of Python's."""
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous):
            self._previous = previous
            signal.signal(signal.SIGINT, self._hold)

    def end(self) -> None:
        """Stops delaying Ctrl-C and raises one that was delayed."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self.pass_on()

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside, Ctrl-C is raised at once."""
        self.pass_on()
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
        try:
            yield
        finally:
            if self._previous is not None:
                signal.signal(signal.SIGINT, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is not None and now - self._since >= INSISTS_AFTER:
            self.pass_on()
        elif self._since is None:
            self._since = now

    def pass_on(self) -> None:
        """Raises the delayed Ctrl-C, if there is one."""
        if self._since is not None:
            self._since = None
            self._previous(signal.SIGINT, None)


@contextmanager
def holding_interrupts() -> Iterator[HeldInterrupts]:
    """Delays Ctrl-C inside to the end of the block; one repeated `INSISTS_AFTER` seconds later is raised at once."""
    held = HeldInterrupts()
    held.begin()
    try:
        yield held
    finally:
        held.end()


@contextmanager
def restoring_modes() -> Iterator[None]:
    """After an error inside, restores whether gradients are enabled, and the nesting of autocast.

    PyTorch's context managers restore their mode in Python, where Ctrl-C may come first.
    """
    is_grad_enabled, level = torch.is_grad_enabled(), _autocast_level()
    try:
        yield
    except BaseException:
        torch.set_grad_enabled(is_grad_enabled)
        while _autocast_level() > level:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        raise


def _autocast_level() -> int:
    """Number of open autocast blocks; the weights that they cast are kept until it is 0."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())
