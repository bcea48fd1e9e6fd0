"""Answers running requests: passes progress from the worker's thread to the event loop, and streams events to clients.

`App` makes one `Responder`. `ProgressRouter` gives each request the progress of its own sequences; `Metrics` counts and
times what is sent.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from hybrid_engine.generation.core import Sequence
from hybrid_engine.generation.guides import CompiledGuide
from hybrid_engine.generation.live.asynchronous import EndedError, LiveThread, TooManyWaitError
from hybrid_engine.generation.live.batches import Progress
from hybrid_engine.serving.errors import RequestError, broken, ended, not_finite, overloaded, rule_failed
from hybrid_engine.serving.responses import Piece, Writer
from hybrid_engine.serving.sessions import Recorder

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # json.dumps would build one per event
_STRICT_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class Finishing(Protocol):
    """Protocol of results that say whether a sequence is finished."""

    @property
    def finish_reason(self) -> str | None:
        """None: more will follow."""


Result = TypeVar("Result", bound=Finishing)
Answer = TypeVar("Answer")
log = logging.getLogger(__name__)


class Inbox:
    """Progress of one request that was not read yet. All steps of a sequence are merged into one Progress.

    A slow client or a busy event loop therefore gets fewer and larger pieces.
    """

    def __init__(self) -> None:
        self._pending: dict[Sequence, Progress] = {}
        self._has_progress = asyncio.Event()

    def put(self, progress: Progress) -> None:
        """Adds to the progress that waits to be read."""
        earlier = self._pending.get(progress.sequence)
        if earlier is not None:
            tokens, logprobs = earlier.tokens + progress.tokens, earlier.logprobs + progress.logprobs
            progress = Progress(progress.sequence, tokens, logprobs, progress.finish_reason)
        self._pending[progress.sequence] = progress
        self._has_progress.set()

    async def take(self) -> list[Progress]:
        """All waiting progress; waits until there is some."""
        await self._has_progress.wait()
        self._has_progress.clear()
        pending, self._pending = self._pending, {}
        return list(pending.values())


class ProgressRouter:
    """Submits requests to a worker and yields each one's progress, in the event loop in which `stream` is called."""

    def __init__(self) -> None:
        self._inboxes: dict[Sequence, Inbox] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def publish(self, progress: list[Progress]) -> None:
        """Called on the worker's thread; wakes the event loop once for all progress of a step."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._deliver, progress)

    def _deliver(self, progress: list[Progress]) -> None:
        for each in progress:
            if (inbox := self._inboxes.get(each.sequence)) is not None:
                inbox.put(each)

    async def stream(
        self, worker: LiveThread, sequences: list[Sequence], read: Callable[[Progress], Result]
    ) -> AsyncIterator[Result]:
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
                for progress in await inbox.take():
                    if progress.sequence not in left:
                        continue
                    if progress.finish_reason == "error":
                        left.discard(progress.sequence)
                        if progress.sequence.error is not None:
                            raise rule_failed(progress.sequence.error)
                        raise ended(worker.error) if worker.has_ended else not_finite()
                    result = read(progress)
                    if result.finish_reason is not None:
                        left.discard(progress.sequence)
                        if progress.finish_reason is None:
                            worker.cancel([progress.sequence])
                    yield result
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


class Metrics:
    """Counters, gauges and histograms of one server; the gauges query its `worker` when they are read."""

    def __init__(self, worker: LiveThread):
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "hybrid_engine_requests",
            "Requests answered, by path and status.",
            ("path", "status"),
            registry=self.registry,
        )
        self.prompt_tokens = Counter("hybrid_engine_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self.generated_tokens = Counter("hybrid_engine_generated_tokens", "Tokens drawn.", registry=self.registry)
        self.cancelled = Counter(
            "hybrid_engine_cancelled_requests", "Requests whose client went away.", registry=self.registry
        )
        self.first_token = Histogram(
            "hybrid_engine_time_to_first_token_seconds",
            "From a request to its first token.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.between_tokens = Histogram(
            "hybrid_engine_time_between_tokens_seconds",
            "Between tokens of a choice.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._gauge("running_sequences", "Sequences that decode.", lambda: worker.num_running)
        self._gauge("waiting_sequences", "Sequences not begun.", lambda: worker.num_waiting)
        self._gauge(
            "kv_cache_usage_perc",
            "Share of the KV blocks that running sequences use, from 0 to 1.",
            lambda: worker.kv_blocks.usage,
        )
        self._gauge("kv_blocks_used", "KV blocks of running sequences.", lambda: worker.kv_blocks.used)
        self._gauge(
            "kv_blocks_kept",
            "KV blocks of finished turns of conversations and of earlier prompts, given up where others need them.",
            lambda: worker.kv_blocks.kept,
        )
        self._gauge("kv_blocks_free", "KV blocks that hold nothing.", lambda: worker.kv_blocks.free)
        self._gauge(
            "prefix_cache_queries",
            "Tokens of prompts that were prefilled; a prompt counts once for all of its answers.",
            lambda: worker.kv_blocks.num_prompt_tokens,
        )
        self._gauge(
            "prefix_cache_hits",
            "Tokens of those whose keys and values an earlier request had left.",
            lambda: worker.kv_blocks.num_reused_tokens,
        )

    def _gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        Gauge(f"hybrid_engine_{name}", meaning, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class Responder:
    """Runs parsed requests and answers them, whole or as a stream of events.

    Args:
        worker: the thread that runs the live batch.
        router: passes the worker's progress to requests.
        metrics: counts and times the tokens.
        on_thread: runs a function on a thread and returns its result.
    """

    def __init__(
        self,
        worker: LiveThread,
        router: ProgressRouter,
        metrics: Metrics,
        on_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
    ):
        self._worker, self._router, self._metrics, self._on_thread = worker, router, metrics, on_thread

    async def respond(
        self,
        request: Request,
        guide: Awaitable[CompiledGuide | None],
        parse: Callable[[], tuple[Writer, Recorder | None]],
    ) -> Response:
        """The response to a request.

        Args:
            guide: the compiled guide of the answers, which must be referenced until they are parsed.
            parse: makes a writer from the body, which may take long.
        """
        compiled = await self._while_connected(request, guide)
        writer, record = await self._while_connected(request, self._on_thread(parse))
        del compiled  # the writer references it; until then this does, so that it stays in the cache
        parsed = writer.parsed
        for sequence in parsed.sequences:
            sequence.share = getattr(request.state, "key_name", "")
        self._metrics.prompt_tokens.inc(sum(map(len, parsed.prompts)))
        progress = self._measured(self._router.stream(self._worker, parsed.sequences, writer.add))
        if parsed.request.stream:
            # The first piece decides whether an error status is returned, which is impossible once a stream has begun.
            first = await self._while_connected(request, anext(progress, None))
            stream = self._stream(first, progress, writer, record)
            return StreamingResponse(stream, media_type="text/event-stream")
        await self._while_connected(request, _read_all(progress))
        return await self._on_thread(partial(_finished, writer, record))

    async def _while_connected(self, request: Request, answer: Awaitable[Answer]) -> Answer:
        """The result of `answer`; if the client disconnects first, cancels it and raises ClientDisconnect."""
        coming = asyncio.ensure_future(answer)
        leaving = asyncio.ensure_future(_until_gone(request))
        try:
            await asyncio.wait({coming, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                self._metrics.cancelled.inc()
                raise ClientDisconnect
        finally:
            leaving.cancel()
            if not coming.done():
                coming.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await coming
        return coming.result()

    async def _stream(
        self, first: Piece | None, progress: AsyncIterator[Piece], writer: Writer, record: Recorder | None
    ) -> AsyncIterator[str]:
        """Server-sent events; if the client stops reading, the request ends."""
        is_complete = False
        try:
            async with contextlib.aclosing(progress):  # type: ignore[type-var]
                for opening in await self._on_thread(partial(_opening, writer)):
                    yield opening
                for event in [] if first is None else writer.chunks(first):
                    yield _event(writer, event)
                async for piece in progress:
                    for event in writer.chunks(piece):
                        yield _event(writer, event)
            if record is not None:
                await self._on_thread(partial(record, writer.choices))
            for event in writer.closing():
                yield _event(writer, event)
            if writer.last_line:
                yield writer.last_line
            is_complete = True
        except RequestError as error:
            yield _event(writer, writer.failure(error))
            is_complete = True
        except Exception:
            log.exception("in a stream")
            yield _event(writer, writer.failure(broken()))
            is_complete = True
        finally:
            if not is_complete:
                self._metrics.cancelled.inc()

    async def _measured(self, progress: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
        """The pieces of `progress`, counted and timed."""
        begin = time.perf_counter()
        latest: dict[int, float] = {}
        async with contextlib.aclosing(progress):  # type: ignore[type-var]
            async for piece in progress:
                now = time.perf_counter()
                if piece.index not in latest:
                    self._metrics.first_token.observe(now - begin)
                elif piece.tokens:
                    self._metrics.between_tokens.observe((now - latest[piece.index]) / len(piece.tokens))
                latest[piece.index] = now
                self._metrics.generated_tokens.inc(len(piece.tokens))
                yield piece


async def _read_all(progress: AsyncIterator[Piece]) -> None:
    async with contextlib.aclosing(progress):  # type: ignore[type-var]
        async for _ in progress:
            pass


def _finished(writer: Writer, record: Recorder | None) -> Response:
    whole = writer.whole()
    if record is not None:
        record(writer.choices)
    return WholeResponse(whole)


def _opening(writer: Writer) -> list[str]:
    """The first events of a stream, which may have whole prompts with their log-probabilities."""
    return [_framed(writer, event, "".join(_ENCODER.iterencode(event))) for event in writer.opening()]


class WholeResponse(JSONResponse):
    """JSON that may be large: it is encoded in small parts, because no other thread can run within one."""

    def render(self, content: Any) -> bytes:
        return "".join(_STRICT_ENCODER.iterencode(content)).encode()


def _event(writer: Writer, body: dict[str, Any]) -> str:
    return _framed(writer, body, _ENCODER.encode(body))


def _framed(writer: Writer, body: dict[str, Any], encoded: str) -> str:
    name = writer.event_name(body)
    return f"data: {encoded}\n\n" if name is None else f"event: {name}\ndata: {encoded}\n\n"


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
