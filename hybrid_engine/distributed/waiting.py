"""Says what a process waits for while processes come together, instead of standing there without a word.

Every process leaves a note of its rank in the store that all of them meet at, by a connection of its own, and who waits
for long reads there who has come.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist

FIRST_AFTER = 5.0
"""Seconds until the first line; the next comes at twice the time, and so on."""
NOTE = "hybrid_engine/came"
MOST_RANKS = 20
"""Ranks named in a line."""


@contextmanager
def announcing(environment: Mapping[str, str], init_method: str | None = None) -> Iterator[None]:
    """While what is inside takes longer than `FIRST_AFTER`, says on stderr which processes are missing.

    Args:
        environment: RANK and WORLD_SIZE; without an `init_method` also MASTER_ADDR and MASTER_PORT.
        init_method: where they meet instead. In a file nobody sees who has come: notes there would be counted.
    """
    ended = threading.Event()
    meeting = _Meeting(int(environment["RANK"]), int(environment["WORLD_SIZE"]), *_place(environment, init_method))
    thread = threading.Thread(target=_announce, args=(meeting, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # a connection under way as Python ends would abort the process


def _place(environment: Mapping[str, str], init_method: str | None) -> tuple[str, tuple[str, int] | None]:
    """What to call the meeting place, and the host and port of its store, if it has any."""
    if init_method is None:
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        return f"{host}:{port}", (host, port)
    url = urlsplit(init_method)
    if url.scheme == "tcp" and url.hostname and url.port:
        return init_method, (url.hostname, url.port)
    return init_method, None


@dataclass(frozen=True)
class _Meeting:
    rank: int
    world_size: int
    place: str
    store_address: tuple[str, int] | None

    def leave_note(self) -> dist.Store | None:
        """The store where the processes meet, with this one's note in it; None while nobody answers there."""
        if self.store_address is None:
            return None
        try:
            timeout = timedelta(seconds=1)
            client = dist.TCPStore(*self.store_address, is_master=False, timeout=timeout, wait_for_workers=False)
            # A launcher's store outlives its processes, which it starts again.
            store = dist.PrefixStore(f"{NOTE}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", client)
            store.set(str(self.rank), "")
        except (RuntimeError, ValueError):  # torch's errors of a store are RuntimeErrors
            return None
        return store

    def describe(self, store: dist.Store | None, seconds: float) -> str:
        """Who waits, where, for how many, and who has not come."""
        text = (
            f"rank {self.rank} has waited {seconds:.0f} s for WORLD_SIZE={self.world_size} processes to meet at "
            f"{self.place}"
        )
        if self.store_address is None:
            return f"{text}; are all of them started, with this init_method?"
        if store is None:
            return f"{text}; nobody answers there, where rank 0 should: is it started, and told this same place?"
        missing = [other for other in range(self.world_size) if not store.check([str(other)])]
        if not missing:
            return f"{text}; all have come and are connecting"
        return f"{text}; {self.world_size - len(missing)} have come, missing: rank {_ranks(missing)}"


def _announce(meeting: _Meeting, ended: threading.Event) -> None:
    start, next_line = time.monotonic(), FIRST_AFTER
    store = None
    while not ended.wait(FIRST_AFTER / 5):
        store = store or meeting.leave_note()
        waited = time.monotonic() - start
        if waited >= next_line and not ended.is_set():
            print(f"hybrid_engine: {meeting.describe(store, waited)}", file=sys.stderr, flush=True)
            next_line *= 2


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:MOST_RANKS]))
    return f"{shown}, ..." if len(ranks) > MOST_RANKS else shown
