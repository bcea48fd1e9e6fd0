"""Ctrl-C: what must not stop halfway is finished first, and what it leaves behind of the process's modes is put back.

Python raises KeyboardInterrupt between any two lines, also between the halves of a step and in the `finally` that
would clean up. Signal handlers run in the main thread alone, so elsewhere there is nothing to hold back.
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
"""Seconds after which another Ctrl-C is not held back; torchrun passes the first one on at once, a second time."""


class HeldInterrupts:
    """Ctrl-C that came inside `holding_interrupts()` and waits for its end."""

    def __init__(self) -> None:
        self._previous: Any = None
        self._since: float | None = None

    def begin(self) -> None:
        """Holds back from here on, where the handler is one of Python's."""
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous):
            self._previous = previous
            signal.signal(signal.SIGINT, self._hold)

    def end(self) -> None:
        """Lets Ctrl-C through again, and what was held first."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self.pass_on()

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside, Ctrl-C comes through at once."""
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
        """Raises what Ctrl-C raises, if it came."""
        if self._since is not None:
            self._since = None
            self._previous(signal.SIGINT, None)


@contextmanager
def holding_interrupts() -> Iterator[HeldInterrupts]:
    """Ctrl-C inside is raised at the end, when what is inside is done; one that is repeated later comes through."""
    held = HeldInterrupts()
    held.begin()
    try:
        yield held
    finally:
        held.end()


@contextmanager
def restoring_modes() -> Iterator[None]:
    """After an error inside, gradients are enabled, and autocast nested, as before.

    PyTorch's context managers put their mode back in Python, where Ctrl-C may come first.
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
    """How many autocast blocks are open; the weights they cast are kept until there is none."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())
