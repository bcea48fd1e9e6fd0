"""The thread that owns the model: takes what was asked for into the running batch, turn by turn.

Other threads only leave notes for it. Between two turns it reads them: who joins, whose client went away, whether to
end. What a turn brought is handed on once a turn, to whoever listens.
"""

import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from hybrid_engine.generation.live.batch import KVBlocks, LiveBatch, Progress
from hybrid_engine.generation.request.core import Sequence

Listener = Callable[[list[Progress]], None]
"""Called on the worker's thread with what a turn brought."""
_SOFT = 1
"""omp_pause_soft: everything may be used again, and is built again then."""


class TooManyWaitError(Exception):
    """As many sequences wait to begin as may."""


class EndedError(Exception):
    """The batch has ended, or is about to."""


@dataclass
class _Notes:
    """What other threads want, read between two turns."""

    joining: list[Sequence] = field(default_factory=list)
    leaving: list[Sequence] = field(default_factory=list)
    is_closing: bool = False
    is_stopping: bool = False
    is_dropping: bool = False


class LiveThread:
    """Runs a LiveBatch in a thread of its own, from `start()` to `close()`.

    Args:
        opening: opens the batch; entered and left on the worker's thread.
        listener: gets every turn's progress; must not wait.
        max_waiting: sequences that may wait to begin, beyond those that run.
    """

    def __init__(self, opening: Callable[[], AbstractContextManager[LiveBatch]], listener: Listener, max_waiting: int):
        self._opening, self._listener, self.max_waiting = opening, listener, max_waiting
        self._notes, self._changed = _Notes(), threading.Condition()
        self._joining: list[Sequence] = []  # those that the batch is taking in
        self._opened = threading.Event()
        self._waiting: Counter[str] = Counter()  # sequences that have not begun, by share
        self._shares: set[str] = set()  # all that were heard of
        self._thread = threading.Thread(target=self._run, name="hybrid-engine-live", daemon=True)
        self.batch: LiveBatch | None = None
        self.error: BaseException | None = None
        self.has_ended = False
        """Whether nobody hears of turns any more."""

    def start(self) -> None:
        """Opens the batch; raises what that raises."""
        give_back_openmp_pool()
        self._thread.start()
        self._opened.wait()
        if self.error is not None:
            self._thread.join()
            raise self.error

    def submit(self, sequences: list[Sequence]) -> None:
        """Lets `sequences` join, which together are one request, all of one share.

        Raises:
            TooManyWaitError: nothing joined; some of those that wait have to begin first. Where others fill the line,
                a share may still have its part of it.
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
        """Takes out what nobody waits for any more; one that has finished stays as it is."""
        with self._changed:
            self._notes.leaving += sequences
            self._changed.notify()

    @property
    def num_waiting(self) -> int:
        """Sequences that have not begun."""
        return self._waiting.total()

    @property
    def num_running(self) -> int:
        """Sequences in the batch now."""
        return 0 if self.batch is None else self.batch.num_running

    @property
    def kv_blocks(self) -> KVBlocks:
        """Blocks of the batch's KV workspace."""
        return KVBlocks(0, 0, 0) if self.batch is None else self.batch.kv_blocks

    def stop(self) -> None:
        """Ends at once; what is unfinished keeps the tokens that it has, and may join another batch.

        Raises what ended the thread, if something did.
        """
        with self._changed:
            self._notes.is_stopping = self._notes.is_closing = True
            self._changed.notify()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def drop(self) -> None:
        """Tells whoever waits, at once, that nothing more comes, and ends after this turn; `close()` waits for it."""
        with self._changed:
            self._notes.is_dropping = True
            self._changed.notify()
        self._tell_of_the_end()

    def close(self) -> None:
        """Waits for everything that was asked for, then gives back what the batch holds.

        Raises what ended the thread, if something did.
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
        """Sequences that have not begun, or begin again, by share; none is zero."""
        joining = Counter(sequence.share for sequence in self._notes.joining)
        if len(self._shares) > 1:
            return joining + Counter(sequence.share for sequence in batch.unfinished if sequence.slot < 0)
        return +Counter(dict.fromkeys(self._shares, batch.num_waiting + joining.total()))

    @property
    def _has_notes(self) -> bool:
        return bool(self._notes.joining or self._notes.leaving or self._notes.is_closing)

    def _tell_of_the_end(self) -> None:
        """Nobody waits for what will not come."""
        with self._changed:
            self._notes.is_closing = self.has_ended = True
            left = self._joining + self._notes.joining
        if self.batch is not None:
            left += [sequence for sequence in self.batch.unfinished if sequence not in left]
        if left:
            self._listener([Progress(sequence, [], [], "error") for sequence in left])


def give_back_openmp_pool() -> bool:
    """Ends the threads that the caller's operations on a CPU are shared out to; its next operation starts them again.

    Every thread that computes has such a pool of its own. GNU's OpenMP counts the threads of all pools, and once they
    are more than the CPUs, none waits actively for work any more: each operation of any thread wakes its pool through
    the kernel, which took a quarter more time for decoding 64 rows on two CPUs (`GOMP_SPINCOUNT` in its manual). So a
    thread that hands the model to another one gives its pool back first.

    Returns:
        Whether there is none now; False where OpenMP is not used, older than 5.0, or the caller is in a parallel part.
    """
    try:
        pause = ctypes.CDLL(torch._C.__file__).omp_pause_resource_all
    except (AttributeError, OSError):
        return False
    return pause(_SOFT) == 0
