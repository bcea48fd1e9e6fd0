"""The web application: paths, keys, limits, and whole or streamed answers.

`Server` makes one `App` and runs it with uvicorn. The first line of each handler's docstring is published by
`openapi.py`.
"""

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hybrid_engine.generation.guides import prepare_guides
from hybrid_engine.generation.live.thread import LiveThread
from hybrid_engine.serving.answers import ChatWriter, CompletionWriter, Piece, Writer
from hybrid_engine.serving.asked import (
    ServedModel,
    chat_tokens,
    check_tokens,
    read_chat,
    read_completion,
    read_tokens,
    try_guide_of,
)
from hybrid_engine.serving.errors import RequestError, broken, cut, ended, wrong_body
from hybrid_engine.serving.keys import Keys
from hybrid_engine.serving.listening import Listening
from hybrid_engine.serving.metrics import Metrics
from hybrid_engine.serving.openapi import Endpoint, build_document
from hybrid_engine.serving.pages import Pages
from hybrid_engine.serving.protocol import (
    MAX_SESSION_ID,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from hybrid_engine.serving.sessions import Recorder, Session, Sessions, recorder_of_chat, recorder_of_tokens

MAX_BODY_BYTES = 4 * 2**20
MAX_BODIES_BYTES = 2**28
"""Limit for the bodies of all requests that are being read."""
SECONDS_FOR_BODY = 30.0
MAX_LISTS = 2**16
"""Maximum number of lists and objects in a body: they take a hundred times as long to read as text of their length."""
MAX_VALUES = 2**19
NUM_THREADS = 4
"""Number of threads that read requests and write answers, in addition to the event loop."""
NUM_TRYING = 2
"""Number of guides that are tried at once."""
Found = TypeVar("Found")
log = logging.getLogger(__name__)
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # json.dumps would build one per event
_STRICT_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)


class App:
    """Serves one model over HTTP.

    Args:
        keys: the keys that clients must send, if there are any.
        pages: the web pages that may send requests if there are no keys.
        max_body_bytes: maximum size of a request's body.
    """

    def __init__(
        self,
        model: ServedModel,
        worker: LiveThread,
        listening: Listening,
        sessions: Sessions,
        *,
        keys: Keys,
        pages: Pages,
        max_body_bytes: int = MAX_BODY_BYTES,
    ):
        self.model, self.worker, self.listening, self.sessions = model, worker, listening, sessions
        self.keys, self.max_body_bytes = keys, max_body_bytes
        self._bodies_bytes = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, "hybrid-engine-request")
        self._trying = ThreadPoolExecutor(NUM_TRYING, "hybrid-engine-guide")
        prepare_guides(model.tokenizer, model.vocab_size)  # before the first request
        model.tokenizer.encode("x")  # the first call disables truncation, which is not thread-safe
        self.metrics = Metrics(worker)
        app = Starlette(routes=self._routes(), exception_handlers={404: _not_found, 405: _not_found})
        app.router.redirect_slashes = False  # a redirect would contain the host that the client sent
        self.asgi = pages.guarded(app, has_keys=bool(keys))

    @property
    def endpoints(self) -> list[Endpoint]:
        """All paths, each with the class of its requests' bodies."""
        return [
            Endpoint("/v1/completions", self.completions, CompletionRequest, has_events=True),
            Endpoint("/v1/chat/completions", self.chat, ChatRequest, has_events=True),
            Endpoint("/tokenize", self.tokenize, TokenizeRequest),
            Endpoint("/tokenizer_info", self.tokenizer_info),
            Endpoint("/detokenize", self.detokenize, DetokenizeRequest),
            Endpoint("/v1/models", self.models),
            Endpoint("/v1/models/{name:path}", self.one_model),
            Endpoint("/health", self.health, needs_key=False),
            Endpoint("/metrics", self.read_metrics, is_for_metrics=True),
            Endpoint("/openapi.json", self.openapi),
        ]

    def _routes(self) -> list[Route]:
        return [
            Route(
                each.path,
                self._guarded(each.handler, is_for_metrics=each.is_for_metrics) if each.needs_key else each.handler,
                methods=[each.method],
            )
            for each in self.endpoints
        ]

    def _guarded(self, handler: Callable[[Request], Any], *, is_for_metrics: bool = False) -> Callable[[Request], Any]:
        """`handler` behind the key check; errors get OpenAI's format, and every answer is counted."""

        async def handle(request: Request) -> Response:
            try:
                self._check_key(request, is_for_metrics)
                response = await handler(request)
            except RequestError as error:
                response = JSONResponse(error.body, error.status, error.headers)
            except ClientDisconnect:
                response = Response(status_code=499)
            except asyncio.CancelledError:  # the server shuts down while it waits for the request
                response = JSONResponse(ended(None).body, ended(None).status)
            except Exception:
                log.exception("at %s", request.scope["route"].path)
                response = JSONResponse(broken().body, broken().status)
            self.metrics.requests.labels(request.scope["route"].path, response.status_code).inc()
            return response

        return handle

    def _check_key(self, request: Request, is_for_metrics: bool) -> None:
        if not self.keys:
            return
        given = next((value for name, value in request.scope["headers"] if name == b"authorization"), b"")
        scheme, _, secret = given.partition(b" ")
        key = self.keys.find(secret) if scheme.lower() == b"bearer" else None
        if key is None or (key.is_for_metrics and not is_for_metrics):
            raise RequestError(
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
            )
        request.state.key_name = key.name

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`: answers that go on from texts or token ids."""
        body = await self._body(request, CompletionRequest)
        session = self._session(request, body)
        await self._try_guide(body)
        return await self._answer(request, partial(self._read_completion, body, session))

    def _read_completion(self, body: CompletionRequest, session: Session | None) -> tuple[Writer, Recorder | None]:
        asked = read_completion(body, self.model)
        record = None if session is None else recorder_of_tokens(self.sessions, session, asked)
        return CompletionWriter(asked, self.model), record

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`: the assistant's next message of a conversation."""
        body = await self._body(request, ChatRequest)
        session = self._session(request, body)
        await self._try_guide(body)
        return await self._answer(request, partial(self._read_chat, body, session))

    def _read_chat(self, body: ChatRequest, session: Session | None) -> tuple[Writer, Recorder | None]:
        if session is None:
            return ChatWriter(read_chat(body, self.model, chat_tokens(body, self.model)), self.model), None
        prompt, node = self.sessions.find_chat(session, body)
        asked = read_chat(body, self.model, prompt)
        record = recorder_of_chat(self.sessions, session, asked, node)
        return ChatWriter(asked, self.model), record

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: the token ids of a prompt or a chat, as vLLM tells them."""
        body = await self._body(request, TokenizeRequest)
        return await self._elsewhere(partial(self._tokenized, body))

    def _tokenized(self, body: TokenizeRequest) -> Response:
        tokens = read_tokens(body, self.model)
        told = {"count": len(tokens), "max_model_len": self.model.longest, "tokens": tokens}
        names = self.model.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return _WholeResponse(told | {"token_strs": names})

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`: the text of token ids, special ones included."""
        body = await self._body(request, DetokenizeRequest)
        check_tokens(body.tokens, self.model, "tokens")
        text = await self._elsewhere(partial(self.model.tokenizer.decode, body.tokens))
        return JSONResponse({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """`GET /tokenizer_info`: special tokens and chat template, as vLLM tells them."""
        tokenizer = self.model.tokenizer
        told: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
        told |= {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        told["chat_template"] = tokenizer.chat_template
        return JSONResponse(
            told | {"tokenizer_class": type(tokenizer).__name__, "model_max_length": self.model.longest}
        )

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`: the model and its adapters."""
        return JSONResponse({"object": "list", "data": [self._model_card(name) for name in self.model.names]})

    async def one_model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`: one of them."""
        name = request.path_params["name"]
        self._check_model(name)
        return JSONResponse(self._model_card(name))

    async def health(self, request: Request) -> Response:
        """`GET /health`: 200, or 503 once the model has failed."""
        if self.worker.error is not None:
            return JSONResponse({"status": "failed", "reason": str(self.worker.error)}, 503)
        return JSONResponse({"status": "ok"})

    async def read_metrics(self, request: Request) -> Response:
        """`GET /metrics`: counters, for Prometheus."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        """`GET /openapi.json`: this document, for holders of a key; a server without keys has none."""
        if not self.keys:
            raise unknown_url(request, 404)
        return JSONResponse(build_document(self.endpoints))

    def _session(self, request: Request, body: Any) -> Session | None:
        """The session that a request names in its body or in a header; None if it names none."""
        session_id = body.session_id or request.headers.get("x-session-id") or None
        if session_id is None:
            return None
        if len(session_id) > MAX_SESSION_ID:
            raise RequestError(f"X-Session-Id has {len(session_id)} characters, and at most {MAX_SESSION_ID} may be")
        session = Session(session_id, getattr(request.state, "key_name", ""))
        self.sessions.check_known(session)
        return session

    def _model_card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self.model.created, "owned_by": "hybrid-engine"}
        card |= {"max_model_len": self.model.longest}
        return card if name == self.model.name else card | {"parent": self.model.name}

    def _check_model(self, name: str) -> None:
        if name not in self.model.names:
            known = ", ".join(map(repr, self.model.names))
            raise RequestError(
                f"model {cut(name)!r} is not served here; there is {known}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def _body(self, request: Request, kind: type[BaseModel]) -> Any:
        """The body as a `kind`; raises RequestError if it is too large, not JSON, or invalid."""
        try:
            raw = await asyncio.wait_for(self._read(request), SECONDS_FOR_BODY)
        except asyncio.TimeoutError as error:
            reason = f"the body did not come within {SECONDS_FOR_BODY:g} s"
            raise RequestError(reason, status=408, code="body_timeout", is_last=True) from error
        try:
            body = await self._elsewhere(partial(_read_body, raw, kind))
        finally:
            self._bodies_bytes -= len(raw)
        if body.model is not None:  # type: ignore[attr-defined]
            self._check_model(body.model)  # type: ignore[attr-defined]
        return body

    async def _read(self, request: Request) -> bytes:
        """The bytes of the body, which count toward the limit until they are parsed.

        Raises RequestError if they, or those of all requests together, are too many.
        """
        parts: list[bytes] = []
        size = 0
        try:
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                self._bodies_bytes += len(part)
                if size > self.max_body_bytes:
                    reason = f"the body is larger than {self.max_body_bytes:,} bytes"
                    raise RequestError(reason, status=413, code="body_too_large", is_last=True)
                if self._bodies_bytes > MAX_BODIES_BYTES:
                    reason = "the bodies of all requests are too much at once; send the request again later"
                    raise RequestError(reason, status=429, code="overloaded", retry_after=1, is_last=True)
        except BaseException:
            self._bodies_bytes -= size
            raise
        return b"".join(parts)

    async def _elsewhere(self, work: Callable[[], Found]) -> Found:
        """Runs `work` on a thread, so that the event loop can serve other requests, and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _try_guide(self, body: ChatRequest | CompletionRequest) -> None:
        """Raises RequestError for a guide that cannot be compiled in time; tried on separate threads."""
        if body.guide or (isinstance(body, ChatRequest) and body.forced_tools is not None):
            trial = partial(try_guide_of, body, self.model)
            await asyncio.get_running_loop().run_in_executor(self._trying, trial)

    def close(self) -> None:
        """Ends the threads; call it when no request is left."""
        for threads in (self._threads, self._trying):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, request: Request, reading: Callable[[], tuple[Writer, Recorder | None]]) -> Response:
        """The response to a request. `reading`, which may take long, makes a writer from the body."""
        writer, record = await self._unless_gone(request, self._elsewhere(reading))
        asked = writer.asked
        for sequence in asked.sequences:
            sequence.share = getattr(request.state, "key_name", "")
        self.metrics.prompt_tokens.inc(sum(map(len, asked.prompts)))
        progress = self._measured(self.listening.run(self.worker, asked.sequences, writer.add))
        if asked.request.stream:
            # The first piece decides whether an error status is returned, which is impossible once a stream has begun.
            first = await self._unless_gone(request, anext(progress, None))
            stream = self._stream(first, progress, writer, record)
            return StreamingResponse(stream, media_type="text/event-stream")
        await self._unless_gone(request, _read_all(progress))
        return await self._elsewhere(partial(_finished, writer, record))

    async def _unless_gone(self, request: Request, answer: Awaitable[Found]) -> Found:
        """The result of `answer`; if the client disconnects first, cancels it and raises ClientDisconnect."""
        coming = asyncio.ensure_future(answer)
        leaving = asyncio.ensure_future(_until_gone(request))
        try:
            await asyncio.wait({coming, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                self.metrics.cancelled.inc()
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
                for opening in await self._elsewhere(partial(_opening, writer)):
                    yield opening
                for event in [] if first is None else writer.chunks(first):
                    yield _event(event)
                async for piece in progress:
                    for event in writer.chunks(piece):
                        yield _event(event)
            if record is not None:
                await self._elsewhere(partial(record, writer.choices))
            if writer.request.usage_of_stream.include_usage:
                yield _event(writer.usage_chunk())
            yield "data: [DONE]\n\n"
            is_complete = True
        except RequestError as error:
            yield _event(error.body)
            is_complete = True
        except Exception:
            log.exception("in a stream")
            yield _event(broken().body)
            is_complete = True
        finally:
            if not is_complete:
                self.metrics.cancelled.inc()

    async def _measured(self, progress: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
        """The pieces of `progress`, counted and timed."""
        begin = time.perf_counter()
        latest: dict[int, float] = {}
        async with contextlib.aclosing(progress):  # type: ignore[type-var]
            async for piece in progress:
                now = time.perf_counter()
                if piece.index not in latest:
                    self.metrics.first_token.observe(now - begin)
                elif piece.tokens:
                    self.metrics.between_tokens.observe((now - latest[piece.index]) / len(piece.tokens))
                latest[piece.index] = now
                self.metrics.generated_tokens.inc(len(piece.tokens))
                yield piece


async def _read_all(progress: AsyncIterator[Piece]) -> None:
    async with contextlib.aclosing(progress):  # type: ignore[type-var]
        async for _ in progress:
            pass


def _read_body(raw: bytes, kind: type[BaseModel]) -> Any:
    try:
        return kind.model_validate(read_json(raw))
    except ValidationError as error:
        raise wrong_body(error) from error


def _finished(writer: Writer, record: Recorder | None) -> Response:
    whole = writer.whole()
    if record is not None:
        record(writer.choices)
    return _WholeResponse(whole)


def _opening(writer: Writer) -> list[str]:
    """The first events of a stream, which may have whole prompts with their log-probabilities."""
    return [f"data: {''.join(_ENCODER.iterencode(event))}\n\n" for event in writer.opening()]


class _WholeResponse(JSONResponse):
    """JSON that may be large: it is encoded in small parts, because no other thread can run within one."""

    def render(self, content: Any) -> bytes:
        return "".join(_STRICT_ENCODER.iterencode(content)).encode()


def read_json(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`, at most 200 levels deep.

    Raises RequestError for anything else, for text that UTF-8 cannot encode, and for too many lists or values.
    """
    _check_counts(raw)
    try:
        values = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(values, dict):
        raise RequestError(f"the body is a {type(values).__name__}; send a JSON object", code="invalid_json")
    return values


def _check_counts(raw: bytes) -> None:
    """Raises RequestError if parsing `raw` would take long, during which no other thread can run."""
    for limit, named, signs in ((MAX_LISTS, "lists and objects", (b"[", b"{")), (MAX_VALUES, "values", (b",",))):
        if sum(map(raw.count, signs)) > limit:
            count = sum(map(_STRINGS.sub(b"", raw).count, signs))  # without those in strings
            if count > limit:
                reason = f"the body has {count:,} {named}, and at most {limit:,} may be; send less"
                raise RequestError(reason, code="body_too_large")


def _event(body: dict[str, Any]) -> str:
    return f"data: {_ENCODER.encode(body)}\n\n"


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _not_found(request: Request, error: Exception) -> Response:
    missing = unknown_url(request, getattr(error, "status_code", 404))
    return JSONResponse(missing.body, missing.status)


def unknown_url(request: Request, status: int) -> RequestError:
    """404 or 405: nothing is served at a path, or not by this method."""
    return RequestError(f"{request.method} {cut(request.url.path)} is not served", status=status, code="unknown_url")
