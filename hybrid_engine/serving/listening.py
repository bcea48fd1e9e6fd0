"""Passes progress from the worker's thread to the event loop: each request gets that of its own sequences.

`app.py` uses this for each request.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol, TypeVar

from hybrid_engine.generation.core import Sequence
from hybrid_engine.generation.live.batches import Progress
from hybrid_engine.generation.live.thread import EndedError, LiveThread, TooManyWaitError
from hybrid_engine.serving.errors import ended, not_finite, overloaded, rule_failed


class Finishing(Protocol):
    """Protocol of results that say whether a sequence is finished."""

    @property
    def finish_reason(self) -> str | None:
        """None: more will follow."""


Heard = TypeVar("Heard", bound=Finishing)


class Inbox:
    """Progress of one request that was not read yet. All steps of a sequence are merged into one Progress.

    A slow client or a busy event loop therefore gets fewer and larger pieces.
    """

    def __init__(self) -> None:
        self._came: dict[Sequence, Progress] = {}
        self._is_there = asyncio.Event()

    def put(self, told: Progress) -> None:
        """Adds to the progress that waits to be read."""
        earlier = self._came.get(told.sequence)
        if earlier is not None:
            tokens, logprobs = earlier.tokens + told.tokens, earlier.logprobs + told.logprobs
            told = Progress(told.sequence, tokens, logprobs, told.finish_reason)
        self._came[told.sequence] = told
        self._is_there.set()

    async def take(self) -> list[Progress]:
        """All waiting progress; waits until there is some."""
        await self._is_there.wait()
        self._is_there.clear()
        came, self._came = self._came, {}
        return list(came.values())


class Listening:
    """Submits requests to a worker and yields each one's progress, in the event loop in which `run` is called."""

    def __init__(self) -> None:
        self._inboxes: dict[Sequence, Inbox] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def tell(self, progress: list[Progress]) -> None:
        """Called on the worker's thread; wakes the event loop once for all progress of a step."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._put, progress)

    def _put(self, progress: list[Progress]) -> None:
        for told in progress:
            if (inbox := self._inboxes.get(told.sequence)) is not None:
                inbox.put(told)

    async def run(
        self, worker: LiveThread, sequences: list[Sequence], read: Callable[[Progress], Heard]
    ) -> AsyncIterator[Heard]:
        """Yields the result of `read` for each progress of `sequences`, until all have finished.

        If `read` finds a sequence finished before the batch does, it is cancelled. If the caller stops iterating, all
        sequences are cancelled.

        Raises:
            RequestError: too many wait, a rule of this request failed, or the model failed.
        """
        self._loop = asyncio.get_running_loop()
        inbox = Inbox()
        self._inboxes |= dict.fromkeys(sequences, inbox)
        left = set(sequences)
        try:
            _submit(worker, sequences)
            while left:
                for told in await inbox.take():
                    if told.sequence not in left:
                        continue
                    if told.finish_reason == "error":
                        left.discard(told.sequence)
                        if told.sequence.error is not None:
                            raise rule_failed(told.sequence.error)
                        raise ended(worker.error) if worker.has_ended else not_finite()
                    heard = read(told)
                    if heard.finish_reason is not None:
                        left.discard(told.sequence)
                        if told.finish_reason is None:
                            worker.cancel([told.sequence])
                    yield heard
        finally:
            for sequence in sequences:
                del self._inboxes[sequence]
            if left:
                worker.cancel(list(left))


def _submit(worker: LiveThread, sequences: list[Sequence]) -> None:
    try:
        worker.submit(sequences)
    except TooManyWaitError as error:
        raise overloaded(worker.num_waiting, worker.max_waiting) from error
    except EndedError as error:
        raise ended(worker.error) from error
