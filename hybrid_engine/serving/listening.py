"""From the worker's thread into the event loop: each request hears of its own sequences."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol, TypeVar

from hybrid_engine.generation.batching.sequence import Sequence
from hybrid_engine.generation.live import Progress
from hybrid_engine.generation.live_thread import EndedError, LiveThread, TooManyWaitError
from hybrid_engine.serving.errors import RequestError, failed, overloaded


class Finishing(Protocol):
    """Anything that says whether a sequence is finished with it."""

    @property
    def finish_reason(self) -> str | None:
        """None: more is to come."""


Heard = TypeVar("Heard", bound=Finishing)


class Listening:
    """Runs requests on a worker and hands every one its progress, in the event loop that it is used in."""

    def __init__(self) -> None:
        self._queues: dict[Sequence, asyncio.Queue[Progress]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def tell(self, progress: list[Progress]) -> None:
        """Called on the worker's thread; wakes the event loop once for all of a turn."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens any more
                self._loop.call_soon_threadsafe(self._put, progress)

    def _put(self, progress: list[Progress]) -> None:
        for told in progress:
            if (queue := self._queues.get(told.sequence)) is not None:
                queue.put_nowait(told)

    async def run(
        self, worker: LiveThread, sequences: list[Sequence], read: Callable[[Progress], Heard]
    ) -> AsyncIterator[Heard]:
        """What `read` makes of what comes for `sequences`, until all have finished.

        `read` may find that a sequence is finished before the batch does: it is taken out then. Whoever stops listening
        takes out all of them.

        Raises:
            RequestError: too many wait, or the model failed.
        """
        self._loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Progress] = asyncio.Queue()
        self._queues |= dict.fromkeys(sequences, queue)
        left = set(sequences)
        try:
            _submit(worker, sequences)
            while left:
                told = await queue.get()
                if told.finish_reason == "error":
                    left.discard(told.sequence)
                    raise failed()
                if told.sequence not in left:
                    continue
                heard = read(told)
                if heard.finish_reason is not None:
                    left.discard(told.sequence)
                    if told.finish_reason is None:
                        worker.cancel([told.sequence])
                yield heard
        finally:
            for sequence in sequences:
                del self._queues[sequence]
            if left:
                worker.cancel(list(left))


def _submit(worker: LiveThread, sequences: list[Sequence]) -> None:
    if len(sequences) > worker.max_waiting:
        raise RequestError(
            f"{len(sequences)} answers are asked for at once, and at most {worker.max_waiting} may wait; send fewer "
            "prompts, or lower n",
            param="n",
            code="too_many_answers",
        )
    try:
        worker.submit(sequences)
    except TooManyWaitError as error:
        raise overloaded(worker.num_waiting, worker.max_waiting) from error
    except EndedError as error:
        reason = "the server is ending; nothing was begun"
        raise RequestError(reason, status=503, kind="server_error", code="unavailable") from error
