"""Connections that bring nothing are closed: what uvicorn leaves open for as long as a client likes."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS_FOR_HEADERS = 20.0
"""Of the first request."""
SECONDS_BETWEEN_REQUESTS = 75.0
"""Clients close a connection that they do not use after seconds (httpx: 5); one that the server closes first may be in
use again by then, and a request is lost."""
MAX_CONNECTIONS = 4096


class BoundedConnection(H11Protocol):
    """One connection, closed where its next request does not begin in time, or too many are open.

    h11 bounds the size of a request's line and headers to 64 KiB.
    """

    def connection_made(self, transport: Any) -> None:
        """Begins to watch a connection that a client has opened."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self._watch(None)

    def _watch(self, last_seen: Any) -> None:
        """Closes the connection unless it has begun or gone on with a request since `last_seen`."""
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
        """Ends the watch of a connection that is closed."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    _watched = False
    _timer: asyncio.TimerHandle | None = None
