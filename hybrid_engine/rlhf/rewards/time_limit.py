"""A limit on the time that somebody else's function may take.

In the main thread a timer of the system interrupts the function where it is: in Python code, in `sleep`, waiting for a
socket, a lock or a process, and in a regular expression or a product of huge numbers, which hold the interpreter lock
and would stop a thread that watched them. Only compiled code that looks for no signals is not interrupted. A function
that sets `signal.alarm` itself takes the timer away; its own limit then holds.

In another thread, or on Windows, nothing can interrupt a function: it runs in a thread that is given up on, and goes on
in the background until the process ends.
"""

import signal
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
SECONDS_TO_NEXT_TRY = 1.0
"""After which a function that swallowed the interruption is interrupted again."""
SMALLEST_DELAY = 1e-3
"""Seconds; a timer of 0 would be none."""
_deadlines: list[float] = []
"""Of the limits that the main thread is in, the outermost first; an inner one must not outlast them."""


class OutOfTime(BaseException):
    """The time is over. No `Exception`: a function that catches those must not take this for one of its own."""


def within(seconds: float, action: Callable[[], Result]) -> Result:
    """The result of `action`, or its error.

    Raises:
        OutOfTime: it did not end within `seconds`.
    """
    can_interrupt = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    return interrupting(seconds, action) if can_interrupt else giving_up(seconds, action)


def interrupting(seconds: float, action: Callable[[], Result]) -> Result:
    """`within` for the main thread; limits may stand in one another, and a timer of the user's goes on afterwards."""
    is_running = True

    def stop(signum: int, frame: object) -> None:
        if is_running:
            raise OutOfTime(f"it did not end within {seconds:g} s")

    started = time.monotonic()
    seconds = min([seconds, *(deadline - started for deadline in _deadlines)])
    _deadlines.append(started + seconds)
    handler_before = signal.signal(signal.SIGALRM, stop)
    delay_before, interval_before = signal.setitimer(
        signal.ITIMER_REAL, max(seconds, SMALLEST_DELAY), SECONDS_TO_NEXT_TRY
    )
    try:
        try:
            return action()
        finally:
            is_running = False  # from here on a late signal must not keep the timer and the handler from their place
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _deadlines.pop()
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler_before is None else handler_before)
        if delay_before:
            rest = max(delay_before - (time.monotonic() - started), SMALLEST_DELAY)
            signal.setitimer(signal.ITIMER_REAL, rest, interval_before)


def giving_up(seconds: float, action: Callable[[], Result]) -> Result:
    """`within` for all other threads."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="time limit", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise OutOfTime(f"it did not end within {seconds:g} s")
    return results[0]
