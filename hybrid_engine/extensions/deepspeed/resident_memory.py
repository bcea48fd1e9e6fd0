"""The memory that this process takes, for machines without GPU: now, and the most since the last reset."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

CLEAR_REFS = Path("/proc/self/clear_refs")
"""Writing 5 to it makes Linux forget the peak; see proc(5)."""
STATUS = Path("/proc/self/status")
"""Where Linux says the peak, as VmHWM."""


class ResidentMemory:
    """Readings of one process; the peak is never below any of them.

    The system's peak alone is: its counters lag behind the reading. Where the system does not forget its peak (not
    Linux), what it says counts again when it has grown since the reset, until then the largest reading does.
    """

    def __init__(self) -> None:
        self._largest = 0
        self._system_peak_at_reset = 0

    def current_bytes(self) -> int:
        """Bytes that are resident now."""
        import psutil  # here, not at the top: on a GPU nobody asks for this

        current: int = psutil.Process().memory_info().rss
        self._largest = max(self._largest, current)
        return current

    def peak_bytes(self) -> int:
        """The most since the last `reset()`, or since the process began."""
        self.current_bytes()
        system_peak = _system_peak_bytes()
        if system_peak > self._system_peak_at_reset:
            self._largest = max(self._largest, system_peak)
        return self._largest

    def reset(self) -> None:
        """Forgets the peak of memory."""
        with suppress(OSError):
            CLEAR_REFS.write_text("5")
        self._system_peak_at_reset = _system_peak_bytes()
        self._largest = 0


def _system_peak_bytes() -> int:
    """The peak of this process alone: on Linux getrusage also counts the process that started it, for good."""
    with suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024  # in kilobytes
    # In kilobytes on Linux, in bytes on a Mac.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
