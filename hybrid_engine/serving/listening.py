"""From the worker's thread into the event loop: each request hears of its own sequences."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol, TypeVar

from hybrid_engine.generation.live.batch import Progress
from hybrid_engine.generation.live.thread import EndedError, LiveThread, TooManyWaitError
from hybrid_engine.generation.request.core import Sequence
from hybrid_engine.serving.errors import ended, not_finite, overloaded, rule_failed


class Finishing(Protocol):
    """Anything that says whether a sequence is finished with it."""

    @property
    def finish_reason(self) -> str | None:
        """None: more is to come."""


Heard = TypeVar("Heard", bound=Finishing)


class Inbox:
    """What came for one request and was not read yet: a sequence's turns are one Progress, however many they were.

    So a client that reads slowly, or an event loop that has much to do, gets fewer and larger pieces.
    """

    def __init__(self) -> None:
        self._came: dict[Sequence, Progress] = {}
        self._is_there = asyncio.Event()

    def put(self, told: Progress) -> None:
        """Adds to what waits to be read."""
        earlier = self._came.get(told.sequence)
        if earlier is not None:
            tokens, logprobs = earlier.tokens + told.tokens, earlier.logprobs + told.logprobs
            told = Progress(told.sequence, tokens, logprobs, told.finish_reason)
        self._came[told.sequence] = told
        self._is_there.set()

    async def take(self) -> list[Progress]:
        """All that waits, once there is something."""
        await self._is_there.wait()
        self._is_there.clear()
        came, self._came = self._came, {}
        return list(came.values())


class Listening:
    """Runs requests on a worker and hands every one its progress, in the event loop that it is used in."""

    def __init__(self) -> None:
        self._inboxes: dict[Sequence, Inbox] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def tell(self, progress: list[Progress]) -> None:
        """Called on the worker's thread; wakes the event loop once for all of a turn."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens any more
                self._loop.call_soon_threadsafe(self._put, progress)

    def _put(self, progress: list[Progress]) -> None:
        for told in progress:
            if (inbox := self._inboxes.get(told.sequence)) is not None:
                inbox.put(told)

    async def run(
        self, worker: LiveThread, sequences: list[Sequence], read: Callable[[Progress], Heard]
    ) -> AsyncIterator[Heard]:
        """What `read` makes of what comes for `sequences`, until all have finished.

        `read` may find that a sequence is finished before the batch does: it is taken out then. Whoever stops listening
        takes out all of them.

        Raises:
            RequestError: too many wait, a rule of the request's own failed, or the model.
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
