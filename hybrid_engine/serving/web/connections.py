"""Closes idle and stalled connections, which uvicorn leaves open for as long as the client does.

`Server` runs uvicorn with `BoundedConnection` as its HTTP protocol.
"""

import asyncio
import logging
import math
import resource
import socket
import struct
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS_FOR_HEADERS = 20.0
"""Time limit for the headers of the first request."""
SECONDS_BETWEEN_REQUESTS = 75.0
"""Idle time after which the server closes a connection. Clients close idle connections after seconds (httpx: 5). If the
server closes first, the client may already use the connection again, and that request is lost.
"""
SECONDS_TO_TAKE = 30.0
"""Default time in which a client must read some of a waiting answer."""
MIN_TAKEN = 4096
"""Bytes that it must read in that time, if there are as many."""
MAX_CONNECTIONS = 4096
SPARE_DESCRIPTORS = 64
"""File descriptors kept for uses other than connections; a quarter of all if there are few."""
SECONDS_BETWEEN_LINES = 60.0
"""Minimum time between log messages about too many connections."""
log = logging.getLogger(__name__)


class _Crowd:
    """Logs, at most once per interval, that there are too many connections."""

    last_line = -math.inf

    def tell(self, num_open: int) -> None:
        """Logs the warning; `num_open`: number of connections that stay open."""
        now = time.monotonic()
        if now - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = now
            log.warning(
                "serving: %d connections are open, which is the limit (at most %d, and %d open files of the process, "
                "ulimit -n): further ones are closed",
                num_open,
                MAX_CONNECTIONS,
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )


_CROWD = _Crowd()


class BoundedConnection(H11Protocol):
    """One connection, which is closed if its next request does not begin in time or its client does not read answers.

    It is also closed if there are too many: MAX_CONNECTIONS, or fewer if the process may open few files.

    h11 limits the size of a request's line and headers to 64 KiB. `stall_seconds`: time in which a client must read
    something.
    """

    def __init__(self, *args: Any, stall_seconds: float, **options: Any):
        super().__init__(*args, **options)
        self.stall_seconds = stall_seconds

    def connection_made(self, transport: Any) -> None:
        """Starts to watch a new connection."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS or _is_among_the_last(transport):
            _CROWD.tell(len(self.connections) - 1)
            transport.abort()
            return
        self._watch(None)
        self._watch_reader(None, math.inf)

    def _watch(self, last_seen: Any) -> None:
        """Closes the connection unless it has started or continued a request since `last_seen`."""
        if self.transport.is_closing():
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self._watched and self.cycle is last_seen:
            self.transport.close()
            return
        self._watched = True
        seconds = SECONDS_FOR_HEADERS if self.cycle is None else SECONDS_BETWEEN_REQUESTS
        self._timer = self.loop.call_later(seconds, self._watch, self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops watching a closed connection."""
        super().connection_lost(exc)
        for timer in (self._timer, self._reader_timer):
            if timer is not None:
                timer.cancel()

    def resume_writing(self) -> None:
        """Records that the client has read most of the waiting data."""
        super().resume_writing()
        self._has_resumed = True

    def _watch_reader(self, last_cycle: Any, last_left: float) -> None:
        """Drops the connection if almost none of `last_left` waiting bytes was read, in an answer to the same request.

        More is written only to a client that has read what is there. Progress therefore means fewer bytes or a resumed
        transport.
        """
        is_waiting = self.flow.write_paused or self.cycle is None or self.cycle.response_complete
        left = self.transport.get_write_buffer_size() if is_waiting else 0
        if left > max(0, last_left - MIN_TAKEN) and self.cycle is last_cycle and not self._has_resumed:
            log.info(
                "serving: a client read nothing of its answer for %g s; its connection is closed", self.stall_seconds
            )
            _reset(self.transport)
            return
        self._has_resumed = False
        self._reader_timer = self.loop.call_later(self.stall_seconds, self._watch_reader, self.cycle, left or math.inf)

    stall_seconds = SECONDS_TO_TAKE
    _watched = _has_resumed = False
    _timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None


def _reset(transport: Any) -> None:
    """Drops a connection and the data that the system holds for the client, which would otherwise still be sent."""
    opened = transport.get_extra_info("socket")
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _is_among_the_last(transport: Any) -> bool:
    """Whether almost no more files may be opened; a new file gets the lowest free number."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return False
    return transport.get_extra_info("socket").fileno() >= most - min(SPARE_DESCRIPTORS, most // 4)
