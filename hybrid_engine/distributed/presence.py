"""Reports which process is gone, or stopped at an error, while the others wait for it in a collective.

A collective that waits for a dead process ends with an error about sockets, or at its timeout. So each process has a
connection to rank 0. Rank 0 tells the others which connection has ended, and which error stopped a process that is
still alive. Nothing is sent during normal operation.
"""

import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from hybrid_engine.distributed.groups import host_group

SECONDS_TO_HEAR = 2.0
"""Seconds that a process whose collective has failed waits to hear why."""
LINE_AFTER = 5.0
"""Seconds in one call of the engine, with another process known to be gone, before a line is printed."""
SECONDS_TO_CONNECT = 10.0
LOST = ("Connection closed", "Connection reset", "Broken pipe", "Timed out", "timeout", "Timeout", "NCCL", "aborted")
"""Words in errors of collectives that other processes did not join."""


class Presence:
    """The state of the other processes as known here; all processes are connected to rank 0."""

    def __init__(self, rank: int, world_size: int) -> None:
        """Connects; collective."""
        self.rank = rank
        self.phase: tuple[str, float] | None = None
        """The current call of the engine in this process, and its start time."""
        self.group_id = id(dist.group.WORLD)
        self._gone: set[int] = set()
        self._errors: dict[int, str] = {}
        self._heard = threading.Event()
        self._has_told = False
        self._lines: set[str] = set()
        self._selector = selectors.DefaultSelector()
        self._received: dict[socket.socket, bytes] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._connect(world_size)
        threading.Thread(target=self._listen, daemon=True).start()

    def _connect(self, world_size: int) -> None:
        server = socket.create_server(("", 0), backlog=world_size) if self.rank == 0 else None
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        place: list[Any] = [None]
        if server is not None:
            place = [(host, server.getsockname()[1], secrets.token_hex(8))]
        dist.broadcast_object_list(place, src=0, group=host_group())
        host, port, self._token = place[0]
        if server is not None:
            self._selector.register(server, selectors.EVENT_READ)
            self._server = server
            return
        try:
            hub = socket.create_connection((host, port), SECONDS_TO_CONNECT)
        except OSError:  # a firewall: errors of collectives stay as they are
            return
        hub.settimeout(None)
        self._add(hub, 0)
        _send(hub, f"{self.rank} {self._token}")

    def _add(self, connection: socket.socket, rank: int) -> None:
        self._received[connection], self._ranks[connection] = b"", rank
        self._selector.register(connection, selectors.EVENT_READ)

    def _listen(self) -> None:
        while True:
            for key, _ in self._selector.select(1.0):
                connection: Any = key.fileobj
                if connection not in self._ranks:
                    self._add(connection.accept()[0], -1)
                else:
                    self._receive(connection)
            self._say_who_is_missing()

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(connection)
            connection.close()
            del self._received[connection]
            rank = self._ranks.pop(connection)
            if rank >= 0:
                self._note({"rank": rank, "gone": True})
            return
        *lines, self._received[connection] = (self._received[connection] + data).split(b"\n")
        for line in lines:
            self._read(connection, line)

    def _read(self, connection: socket.socket, line: bytes) -> None:
        if self._ranks[connection] >= 0:
            self._note(json.loads(line))
            return
        rank, _, token = line.partition(b" ")  # from a new connection, whose rank is not known yet
        if secrets.compare_digest(token, self._token.encode()):
            self._ranks[connection] = int(rank)
        else:
            connection.shutdown(socket.SHUT_RDWR)

    def _note(self, message: dict[str, Any]) -> None:
        """Stores a message about a process; rank 0 forwards it."""
        rank = message["rank"]
        if message.get("gone"):
            self._gone.add(rank)
        elif message["error"] is None:
            self._errors.pop(rank, None)
        else:
            self._errors[rank] = message["error"]
        if self.rank == 0:
            for connection, other in list(self._ranks.items()):
                if other not in (rank, -1):
                    _send(connection, json.dumps(message))
        self._heard.set()

    def tell(self, error: str | None) -> None:
        """Tells all others which error stopped this process; None: it continues."""
        if error is None and not self._has_told:
            return
        self._has_told = error is not None
        message = json.dumps({"rank": self.rank, "error": error})
        for connection, rank in list(self._ranks.items()):
            if rank >= 0:
                _send(connection, message)

    def describe(self) -> str:
        """The missing processes and their errors; empty if none is known."""
        gone = [f"rank {rank} is gone{self._last_words(rank)}" for rank in sorted(self._gone)]
        stopped = [f"rank {rank} stopped at {text}" for rank, text in self._errors.items() if rank not in self._gone]
        return "; ".join(gone + stopped)

    def _last_words(self, rank: int) -> str:
        return f", it stopped at {self._errors[rank]}" if rank in self._errors else ""

    def wait_to_hear(self) -> str:
        """The result of `describe` as soon as it is not empty; empty after `SECONDS_TO_HEAR`."""
        end = time.monotonic() + SECONDS_TO_HEAR
        while not self.describe() and time.monotonic() < end:
            self._heard.clear()
            self._heard.wait(0.1)
        return self.describe()

    def _say_who_is_missing(self) -> None:
        """Prints a line: a collective on a GPU waits until its timeout and does not mention other processes."""
        phase, known = self.phase, self.describe()
        if phase is None or not known or known in self._lines:
            return
        seconds = time.monotonic() - phase[1]
        if seconds >= LINE_AFTER:
            self._lines.add(known)
            line = f"hybrid_engine: rank {self.rank} has been in {phase[0]} for {seconds:.0f} s; {known}"
            print(line, file=sys.stderr, flush=True)


def _send(connection: socket.socket, message: str) -> None:
    with suppress(OSError), _sending:  # the end of a connection is noticed by its reader
        connection.sendall(message.encode() + b"\n")


_sending = threading.Lock()
# One for the process group of this process, of which there is also one.
_presence: Presence | None = None


def start() -> None:
    """Connects the processes of a process group, once; collective."""
    global _presence
    if _presence is None or _presence.group_id != id(dist.group.WORLD):
        _presence = Presence(dist.get_rank(), dist.get_world_size())


@contextmanager
def naming_who_left(phase: str) -> Iterator[None]:
    """Wraps a call of the engine, named `phase`, and tells the other processes about an error in it.

    Raises:
        RuntimeError: a collective failed because a process is gone or was stopped; the message names it.
    """
    presence = _presence
    if presence is None or presence.phase is not None:
        yield
        return
    presence.tell(None)
    presence.phase = phase, time.monotonic()
    try:
        yield
    except BaseException as error:
        if isinstance(error, RuntimeError) and any(words in str(error) for words in LOST):
            known = presence.wait_to_hear()
            if known:
                raise RuntimeError(f"{phase}: {known}; start the processes again ({error})") from error
        presence.tell(f"{phase}: {type(error).__name__}: {error}"[:500])
        raise
    finally:
        presence.phase = None
