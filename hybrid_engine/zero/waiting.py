"""Says what a process waits for while processes come together, instead of standing there without a word.

Every process leaves a note of its rank in the store that all of them meet at, by a connection of its own, and who waits
for long reads there who has come.
"""

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

FIRST_AFTER = 5.0
"""Seconds until the first line; the next comes at twice the time, and so on."""
NOTE = "hybrid_engine/came"
MOST_RANKS = 20
"""Ranks named in a line."""


@contextmanager
def announcing(environment: Mapping[str, str]) -> Iterator[None]:
    """While what is inside takes longer than `FIRST_AFTER`, says on stderr which processes are missing.

    Args:
        environment: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_announce, args=(dict(environment), ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # a connection under way as Python ends would abort the process


def _announce(environment: dict[str, str], ended: threading.Event) -> None:
    start, next_line = time.monotonic(), FIRST_AFTER
    store = None
    while not ended.wait(FIRST_AFTER / 5):
        store = store or _leave_note(environment)
        waited = time.monotonic() - start
        if waited >= next_line and not ended.is_set():
            print(f"hybrid_engine: {_describe(environment, store, waited)}", file=sys.stderr, flush=True)
            next_line *= 2


def _leave_note(environment: dict[str, str]) -> dist.Store | None:
    """The store where the processes meet, with this one's note in it; None while nobody answers there."""
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    try:
        client = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False)
        # A launcher's store outlives its processes, which it starts again.
        store = dist.PrefixStore(f"{NOTE}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", client)
        store.set(environment["RANK"], "")
    except (RuntimeError, ValueError):  # torch's errors of a store are RuntimeErrors
        return None
    return store


def _describe(environment: dict[str, str], store: dist.Store | None, waited: float) -> str:
    rank, size = environment["RANK"], int(environment["WORLD_SIZE"])
    place = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    text = f"rank {rank} has waited {waited:.0f} s for WORLD_SIZE={size} processes to meet at {place}; "
    if store is None:
        return f"{text}nobody answers there, where rank 0 should: is it started, with this MASTER_ADDR and MASTER_PORT?"
    missing = [other for other in range(size) if not store.check([str(other)])]
    came = size - len(missing)
    if not missing:
        return f"{text}all have come and are connecting"
    return f"{text}{came} have come, missing: rank {_ranks(missing)}"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:MOST_RANKS]))
    return f"{shown}, ..." if len(ranks) > MOST_RANKS else shown
