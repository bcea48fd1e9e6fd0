"""The web application: paths, keys, and the handlers of requests. `Server` makes one `App` and runs it with uvicorn.

The life of one chat request:

1. `BoundedConnection` (`connections.py`) accepts the connection, uvicorn parses the head. Without keys `PageGuard`
   (`access.py`) refuses what a foreign web page could have sent.
2. `App._guarded` checks the key and turns errors into the format of the path's protocol; `App.chat` handles the path.
3. `BodyReader.read` (`request_parsing.py`) receives the body and makes a `ChatRequest` of it (`protocol.py`).
   `App._session` finds the session that the request names, `GuideThreads.compile` compiles the guide of the answer.
4. `App._read_chat` runs on a thread: `Sessions.find_chat` (`sessions.py`) or `chat_tokens` (`request_parsing.py`) gives
   the prompt's token ids, `read_chat` a `ParsedRequest` with its sequences, and a `ChatWriter` (`responses.py`) will
   write the answer.
5. `Responder.respond` (`streaming.py`) submits the sequences to the `LiveThread`, which decodes them in the live batch.
   `ProgressRouter` carries the tokens of each step from that thread to the request.
6. `ChatWriter.add` makes text, tool calls and reasoning of the tokens (`parsers/`).
   `Responder._stream` sends them as events, or `ChatWriter.whole` makes one body at the end.
7. The recorder of the session stores the answer (`Sessions.record`). A client that leaves cancels its sequences
   (`Responder._while_connected`).

`/v1/messages`, `/v1/responses` and `/inference/v1/generate` (`protocols/`) differ in steps 3 and 6 only: their bodies
are translated to a `ChatRequest` or a `CompletionRequest`, and their writers are subclasses of `ChatWriter` and
`CompletionWriter`.

The first line of each handler's docstring is published in the OpenAPI document, which is made from the classes of the
request bodies, so that both always agree (https://spec.openapis.org/oas/v3.1.1). Some schemas allow more than the
server does, which also checks several fields together. They allow everything that the server accepts.
"""

import asyncio
import inspect
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hybrid_engine.generation.guides import CompiledGuide, prepare_guides
from hybrid_engine.generation.live.asynchronous import LiveThread
from hybrid_engine.serving.errors import RequestError, broken, cut, ended, error_body, overloaded, wrong_body
from hybrid_engine.serving.protocol import (
    MAX_SESSION_ID,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from hybrid_engine.serving.protocols.anthropic_messages import CountTokensRequest, MessagesRequest, MessagesWriter
from hybrid_engine.serving.protocols.openai_responses import ResponsesRequest, ResponsesWriter, StoredResponses
from hybrid_engine.serving.protocols.token_generation import GenerateRequest, GenerateWriter
from hybrid_engine.serving.request_parsing import (
    BodyReader,
    ParsedRequest,
    ServedModel,
    chat_tokens,
    check_tokens,
    compile_guide_of,
    read_chat,
    read_completion,
    read_tokens,
)
from hybrid_engine.serving.responses import ChatWriter, CompletionWriter, Writer
from hybrid_engine.serving.sessions import Recorder, Session, Sessions, recorder_of_chat, recorder_of_tokens
from hybrid_engine.serving.web.access import Keys, Pages
from hybrid_engine.serving.web.streaming import Metrics, ProgressRouter, Responder, WholeResponse

REFERENCE = "#/components/schemas/{model}"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
NUM_THREADS = 4
"""Number of threads that read requests and write answers, in addition to the event loop."""
NUM_COMPILING = 2
"""Number of guides that are compiled at once, each of another key."""
Found = TypeVar("Found")
MakeWriter = Callable[[ParsedRequest], Writer]
log = logging.getLogger(__name__)


class Endpoint(NamedTuple):
    """A path that the server answers at."""

    path: str
    handler: Callable[..., Any]
    """Handler of the path. The first line of its docstring describes the answer: "`GET /path`: ..."."""
    body: type[BaseModel] | None = None
    """The class of a POST's body; None for a GET."""
    has_events: bool = False
    """Whether it can answer with server-sent events."""
    is_for_metrics: bool = False
    """Whether a key for metrics opens it."""
    needs_key: bool = True
    """Whether it requires a key if the server has any."""

    @property
    def method(self) -> str:
        """The HTTP method."""
        return "GET" if self.body is None else "POST"


def build_document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of `endpoints`."""
    known = list(endpoints)
    bodies = [(each.body, "validation") for each in known if each.body is not None]
    _, schemas = models_json_schema(bodies, ref_template=REFERENCE)  # type: ignore[arg-type]
    return {
        "openapi": "3.1.0",
        "info": {"title": "hybrid-engine", "version": "1"},
        "paths": {
            each.path.replace(":path", ""): {each.method.lower(): _operation(each, _summary(each.handler))}
            for each in known
        },
        "components": {
            "schemas": schemas["$defs"] | {"Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _summary(handler: Callable[..., Any]) -> str:
    return (inspect.getdoc(handler) or "").partition("\n")[0].partition(": ")[2] or handler.__name__


def _operation(endpoint: Endpoint, summary: str) -> dict[str, Any]:
    kind = "text/plain" if endpoint.is_for_metrics else "application/json"
    content: dict[str, Any] = {kind: {}} | ({"text/event-stream": {}} if endpoint.has_events else {})
    error = {"application/json": {"schema": {"$ref": REFERENCE.format(model="Error")}}}
    responses = {
        "200": {"description": "The answer.", "content": content},
        "default": {"description": "What is wrong.", "content": error},
    }
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if endpoint.needs_key:
        operation["security"] = [{"key": []}]
    if "{name" in endpoint.path:
        named = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [named]
    if endpoint.body is not None:
        schema = {"$ref": REFERENCE.format(model=endpoint.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


class App:
    """Serves one model over HTTP.

    Args:
        keys: the keys that clients must send, if there are any.
        pages: the web pages that may send requests if there are no keys.
    """

    def __init__(
        self,
        model: ServedModel,
        worker: LiveThread,
        router: ProgressRouter,
        sessions: Sessions,
        *,
        keys: Keys,
        pages: Pages,
    ):
        self.model, self.worker, self.sessions, self.keys = model, worker, sessions, keys
        self._threads = ThreadPoolExecutor(NUM_THREADS, "hybrid-engine-request")
        self._guides = GuideThreads(model)
        # Before the first request, because no other thread runs meanwhile: 0.2 s for a vocabulary of 150,000.
        prepare_guides(model.tokenizer)
        assert model.longest_token > 0
        model.tokenizer.encode("x")  # the first call disables truncation, which is not thread-safe
        self.metrics = Metrics(worker)
        self.stored = StoredResponses()
        self._bodies = BodyReader(self._on_thread)
        self._responder = Responder(worker, router, self.metrics, self._on_thread)
        app = Starlette(routes=self._routes(), exception_handlers={404: _not_found, 405: _not_found})
        app.router.redirect_slashes = False  # a redirect would contain the host that the client sent
        self.asgi = pages.guarded(app, has_keys=bool(keys))

    @property
    def endpoints(self) -> list[Endpoint]:
        """All paths, each with the class of its requests' bodies."""
        return [
            Endpoint("/v1/completions", self.completions, CompletionRequest, has_events=True),
            Endpoint("/v1/chat/completions", self.chat, ChatRequest, has_events=True),
            Endpoint("/v1/responses", self.responses, ResponsesRequest, has_events=True),
            Endpoint("/v1/messages", self.messages, MessagesRequest, has_events=True),
            Endpoint("/v1/messages/count_tokens", self.count_tokens, CountTokensRequest),
            Endpoint("/inference/v1/generate", self.generate, GenerateRequest, has_events=True),
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
        """`handler` behind the key check; errors get the format of the path, and every answer is counted."""

        async def handle(request: Request) -> Response:
            try:
                self._check_key(request, is_for_metrics)
                response = await handler(request)
            except RequestError as error:
                response = _error_response(request, error)
            except ClientDisconnect:
                response = Response(status_code=499)
            except asyncio.CancelledError:  # the server shuts down while it waits for the request
                response = _error_response(request, ended(None))
            except Exception:
                log.exception("at %s", request.scope["route"].path)
                response = _error_response(request, broken())
            self.metrics.requests.labels(request.scope["route"].path, response.status_code).inc()
            return response

        return handle

    def _check_key(self, request: Request, is_for_metrics: bool) -> None:
        admission = self.keys.admit(request.headers)
        if admission is None or (admission.is_for_metrics and not is_for_metrics):
            raise RequestError(
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
            )
        request.state.key_name, request.state.session_id = admission.key_name, admission.session_id

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`: answers that go on from texts or token ids."""
        body = await self._read_body(request, CompletionRequest)
        return await self._complete(request, body, partial(CompletionWriter, model=self.model))

    async def generate(self, request: Request) -> Response:
        """`POST /inference/v1/generate`: tokens in, tokens and log-probabilities out, as vLLM has it."""
        body = await self._read_body(request, GenerateRequest)
        completion = await self._translated(partial(body.to_completion, self.model))
        return await self._complete(request, completion, partial(GenerateWriter, body, model=self.model))

    async def _complete(self, request: Request, body: CompletionRequest, write: MakeWriter) -> Response:
        session = self._session(request, body.session_id)
        guide = self._guides.compile(body, _key_name(request))
        return await self._responder.respond(request, guide, partial(self._read_completion, body, session, write))

    def _read_completion(
        self, body: CompletionRequest, session: Session | None, write: MakeWriter
    ) -> tuple[Writer, Recorder | None]:
        if session is None:
            return write(read_completion(body, self.model)), None
        (first, *_) = read_completion(body, self.model).prompts
        parsed = read_completion(self.sessions.as_drawn(session, body, first, self.model.longest), self.model)
        return write(parsed), recorder_of_tokens(self.sessions, session, parsed)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`: the assistant's next message of a conversation."""
        body = await self._read_body(request, ChatRequest)
        return await self._converse(request, body, partial(ChatWriter, model=self.model))

    async def messages(self, request: Request) -> Response:
        """`POST /v1/messages`: the assistant's next message by Anthropic's protocol."""
        body = await self._read_body(request, MessagesRequest)
        chat = await self._translated(body.to_chat)
        return await self._converse(request, chat, partial(MessagesWriter, body, model=self.model))

    async def count_tokens(self, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`: the number of tokens of a conversation by Anthropic's protocol."""
        body = await self._read_body(request, CountTokensRequest)
        chat = await self._translated(body.to_chat)
        tokens = await self._on_thread(partial(chat_tokens, chat, self.model))
        return JSONResponse({"input_tokens": len(tokens)})

    async def responses(self, request: Request) -> Response:
        """`POST /v1/responses`: the next items of a conversation by OpenAI's protocol of responses."""
        body = await self._read_body(request, ResponsesRequest)
        earlier = self.stored.find(_key_name(request), body.previous_response_id)
        chat = await self._translated(partial(body.to_chat, earlier))
        write = partial(ResponsesWriter, body, chat, stored=self.stored, key=_key_name(request), model=self.model)
        return await self._converse(request, chat, write)

    async def _converse(self, request: Request, body: ChatRequest, write: MakeWriter) -> Response:
        session = self._session(request, body.session_id)
        guide = self._guides.compile(body, _key_name(request))
        return await self._responder.respond(request, guide, partial(self._read_chat, body, session, write))

    def _read_chat(
        self, body: ChatRequest, session: Session | None, write: MakeWriter
    ) -> tuple[Writer, Recorder | None]:
        if session is None:
            return write(read_chat(body, self.model, chat_tokens(body, self.model))), None
        prompt, node = self.sessions.find_chat(session, body)
        parsed = read_chat(self.sessions.as_drawn(session, body, prompt, self.model.longest), self.model, prompt)
        record = recorder_of_chat(self.sessions, session, parsed, node)
        return write(parsed), record

    async def _translated(self, translate: Callable[[], Found]) -> Found:
        """A request in the words of OpenAI's chats or completions; RequestError if it cannot be one."""
        try:
            return await self._on_thread(translate)
        except ValidationError as error:
            raise wrong_body(error) from error

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: the token ids of a prompt or a chat, as vLLM tells them."""
        body = await self._read_body(request, TokenizeRequest)
        return await self._on_thread(partial(self._tokenized, body))

    def _tokenized(self, body: TokenizeRequest) -> Response:
        tokens = read_tokens(body, self.model)
        fields = {"count": len(tokens), "max_model_len": self.model.longest, "tokens": tokens}
        names = self.model.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return WholeResponse(fields | {"token_strs": names})

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`: the text of token ids, special ones included."""
        body = await self._read_body(request, DetokenizeRequest)
        check_tokens(body.tokens, self.model, "tokens")
        text = await self._on_thread(partial(self.model.tokenizer.decode, body.tokens))
        return JSONResponse({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """`GET /tokenizer_info`: special tokens and chat template, as vLLM tells them."""
        tokenizer = self.model.tokenizer
        fields: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
        fields |= {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        fields["chat_template"] = tokenizer.chat_template
        return JSONResponse(
            fields | {"tokenizer_class": type(tokenizer).__name__, "model_max_length": self.model.longest}
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

    def _session(self, request: Request, of_body: str | None) -> Session | None:
        """The session that a request names in its body, in a header or inside its key; None if it names none.

        Raises RequestError if it names two.
        """
        header, of_key = request.headers.get("x-session-id"), request.state.session_id
        named = dict.fromkeys(name for name in (of_body, header, of_key) if name)
        if not named:
            return None
        if len(named) > 1:
            raise RequestError(
                "the body, the header X-Session-Id and the API key name different sessions; name one",
                param="session_id",
                code="invalid_value",
            )
        (session_id,) = named
        if len(session_id) > MAX_SESSION_ID:
            raise RequestError(
                f"the session's id has {len(session_id)} characters, but at most {MAX_SESSION_ID} are allowed"
            )
        session = Session(session_id, _key_name(request))
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

    async def _read_body(self, request: Request, kind: type[BaseModel]) -> Any:
        """The body as a `kind`; raises RequestError if it is invalid or names another model."""
        body = await self._bodies.read(request, kind)
        if body.model is not None:
            self._check_model(body.model)
        return body

    async def _on_thread(self, work: Callable[[], Found]) -> Found:
        """Runs `work` on a thread, so that the event loop can serve other requests, and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Ends the threads; call it when no request is left."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._guides.close()


class GuideThreads:
    """Compiles the guides of requests on threads of their own, one at a time for each key.

    A guide may take many seconds. Requests of other keys, and those without a guide, do not wait for it.
    """

    def __init__(self, model: ServedModel):
        self._model = model
        self._threads = ThreadPoolExecutor(NUM_COMPILING, "hybrid-engine-guide")
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._num_waiting: Counter[str] = Counter()

    async def compile(self, body: ChatRequest | CompletionRequest, key: str) -> CompiledGuide | None:
        """The compiled guide of a request; None if it has none.

        Raises RequestError for a guide that cannot be compiled, and if too many of the key wait.
        """
        if not body.guide and not (isinstance(body, ChatRequest) and body.forced_tools is not None):
            return None
        if self._num_waiting[key] >= self._model.max_answers:
            raise overloaded(self._num_waiting[key], self._model.max_answers, "guides wait to be compiled")
        self._num_waiting[key] += 1
        try:
            await self._turns[key].acquire()
            work = partial(compile_guide_of, body, self._model)
            compiling = asyncio.get_running_loop().run_in_executor(self._threads, work)
            compiling.add_done_callback(lambda _: self._turns[key].release())
            return await asyncio.shield(compiling)  # it cannot be interrupted: it has its turn if the client leaves
        finally:
            self._num_waiting[key] -= 1

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _key_name(request: Request) -> str:
    """The name of the client's key; empty if keys have no names."""
    return getattr(request.state, "key_name", "")


def _error_response(request: Request, error: RequestError) -> Response:
    return JSONResponse(error_body(request.url.path, error), error.status, error.headers)


async def _not_found(request: Request, error: Exception) -> Response:
    return _error_response(request, unknown_url(request, getattr(error, "status_code", 404)))


def unknown_url(request: Request, status: int) -> RequestError:
    """404 or 405: nothing is served at a path, or not by this method."""
    return RequestError(f"{request.method} {cut(request.url.path)} is not served", status=status, code="unknown_url")
