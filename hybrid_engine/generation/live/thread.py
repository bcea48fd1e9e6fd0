"""The thread that owns the model and runs a live batch turn by turn, for servers and asynchronous rollouts.

Other threads only leave notes for it. Between two turns it reads them: sequences that join, canceled ones, and whether
to end. After each turn it passes the progress to the listener.
"""

import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from hybrid_engine.generation.core import Sequence
from hybrid_engine.generation.live.batches import KVBlocks, LiveBatch, Progress

Listener = Callable[[list[Progress]], None]
"""Called on the worker's thread with the progress of a turn."""
_SOFT = 1
"""omp_pause_soft: resources may be used again and are then created again."""


class TooManyWaitError(Exception):
    """The maximum number of sequences already waits to start."""


class EndedError(Exception):
    """The batch has ended, or is about to."""


@dataclass
class _Notes:
    """Requests of other threads, read between two turns."""

    joining: list[Sequence] = field(default_factory=list)
    leaving: list[Sequence] = field(default_factory=list)
    is_closing: bool = False
    is_stopping: bool = False
    is_dropping: bool = False


class LiveThread:
    """Runs a LiveBatch in a thread of its own, from `start()` to `close()`.

    Args:
        opening: opens the batch; entered and left on the worker's thread.
        listener: called with every turn's progress; must not block.
        max_waiting: number of sequences that may wait to start, in addition to running ones.
    """

    def __init__(self, opening: Callable[[], AbstractContextManager[LiveBatch]], listener: Listener, max_waiting: int):
        self._opening, self._listener, self.max_waiting = opening, listener, max_waiting
        self._notes, self._changed = _Notes(), threading.Condition()
        self._joining: list[Sequence] = []  # sequences that the batch is adding
        self._opened = threading.Event()
        self._waiting: Counter[str] = Counter()  # number of sequences not started, by share
        self._shares: set[str] = set()  # all shares seen so far
        self._thread = threading.Thread(target=self._run, name="hybrid-engine-live", daemon=True)
        self.batch: LiveBatch | None = None
        self.error: BaseException | None = None
        self.has_ended = False
        """Whether turns are no longer reported."""

    def start(self) -> None:
        """Opens the batch; raises the error of opening it."""
        give_back_openmp_pool()
        self._thread.start()
        self._opened.wait()
        if self.error is not None:
            self._thread.join()
            raise self.error

    def submit(self, sequences: list[Sequence]) -> None:
        """Queues `sequences`, which form one request of one share.

        Raises:
            TooManyWaitError: no sequence was queued; some waiting ones have to start first. If others fill the line, a
                share may still have its part of it.
            EndedError: the batch has ended, or is about to.
        """
        with self._changed:
            if self._notes.is_closing or self.error is not None:
                raise EndedError
            if not sequences:
                return
            share = sequences[0].share
            if self._waiting and not self._has_room(share, len(sequences)):
                raise TooManyWaitError
            self._shares.add(share)
            self._notes.joining += sequences
            self._waiting[share] += len(sequences)
            self._changed.notify()

    def _has_room(self, share: str, count: int) -> bool:
        if self.num_waiting + count <= self.max_waiting:
            return True
        part = self.max_waiting // len(self._waiting.keys() | {share})
        return self._waiting[share] + count <= part

    def cancel(self, sequences: list[Sequence]) -> None:
        """Removes sequences that are no longer wanted; a finished one is not changed."""
        with self._changed:
            self._notes.leaving += sequences
            self._changed.notify()

    @property
    def num_waiting(self) -> int:
        """Number of sequences that have not started."""
        return self._waiting.total()

    @property
    def num_running(self) -> int:
        """Number of sequences in the batch that decode now."""
        return 0 if self.batch is None else self.batch.num_running

    @property
    def kv_blocks(self) -> KVBlocks:
        """Use of the blocks of the batch's KV workspace."""
        return KVBlocks(0, 0, 0) if self.batch is None else self.batch.kv_blocks

    def stop(self) -> None:
        """Ends at once; unfinished sequences keep their tokens, and may join another batch.

        Raises the error that ended the thread, if any.
        """
        with self._changed:
            self._notes.is_stopping = self._notes.is_closing = True
            self._changed.notify()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def drop(self) -> None:
        """Reports at once that nothing more comes, and ends after this turn; `close()` waits for the end."""
        with self._changed:
            self._notes.is_dropping = True
            self._changed.notify()
        self._tell_of_the_end()

    def close(self) -> None:
        """Waits for all queued sequences, then releases what the batch holds.

        Raises the error that ended the thread, if any.
        """
        with self._changed:
            self._notes.is_closing = True
            self._changed.notify()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            with self._opening() as self.batch:
                self._opened.set()
                self._serve(self.batch)
        except BaseException as error:
            self.error = error
        finally:
            self._opened.set()
            self._tell_of_the_end()

    def _serve(self, batch: LiveBatch) -> None:
        seconds, stayed = batch.seconds_between_stays, time.monotonic()
        while True:
            with self._changed:
                while not (self._has_notes or batch.has_work):
                    if not self._changed.wait(seconds):
                        break
                notes, self._notes = self._notes, _Notes(is_closing=self._notes.is_closing)
                self._joining = notes.joining
            if seconds is not None and time.monotonic() - stayed >= seconds:
                batch.stay()
                stayed = time.monotonic()
            if notes.is_dropping:
                return
            batch.add(notes.joining)
            self._joining = []
            if notes.is_stopping:
                self._listener(batch.take_out())
                return
            if notes.is_closing and not batch.has_work:
                return
            batch.cancel(notes.leaving)
            progress = batch.turn() if batch.has_work else []
            self._waiting = self._count_waiting(batch)
            if progress:
                self._listener(progress)

    def _count_waiting(self, batch: LiveBatch) -> Counter[str]:
        """Counts sequences that have not started, or start again, by share; no count is zero."""
        joining = Counter(sequence.share for sequence in self._notes.joining)
        if len(self._shares) > 1:
            return joining + Counter(sequence.share for sequence in batch.unfinished if sequence.slot < 0)
        return +Counter(dict.fromkeys(self._shares, batch.num_waiting + joining.total()))

    @property
    def _has_notes(self) -> bool:
        return bool(self._notes.joining or self._notes.leaving or self._notes.is_closing)

    def _tell_of_the_end(self) -> None:
        """Reports an error for every unfinished sequence."""
        with self._changed:
            self._notes.is_closing = self.has_ended = True
            left = self._joining + self._notes.joining
        if self.batch is not None:
            left += [sequence for sequence in self.batch.unfinished if sequence not in left]
        if left:
            self._listener([Progress(sequence, [], [], "error") for sequence in left])


def give_back_openmp_pool() -> bool:
    """Ends the threads that the caller's CPU operations are distributed to; its next operation starts them again.

    Every thread that computes has such a pool of its own. GNU's OpenMP counts the threads of all pools, and once they
    outnumber the CPUs, none waits actively for work any more: each operation of any thread wakes its pool through the
    kernel (`GOMP_SPINCOUNT` in its manual), with which decoding 64 rows on two CPUs took a quarter more time. So a
    thread that hands the model to another one ends its pool first.

    Returns:
        Whether there is no pool now; False if OpenMP is not used or older than 5.0, or the caller is in a parallel
        region.
    """
    try:
        pause = ctypes.CDLL(torch._C.__file__).omp_pause_resource_all
    except (AttributeError, OSError):
        return False
    return pause(_SOFT) == 0
