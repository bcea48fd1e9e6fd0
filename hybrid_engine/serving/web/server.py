"""`Server` runs the web application and a live batch, each on a thread of its own.

`engine.serving()` and `hybrid-engine serve` call `build_server`, which finds name, tokenizer and end tokens where the
model was loaded from. Processes that share the model with the leader get a `FollowingServer`. The life of a request is
told in `app.py`.
"""

import importlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import uvicorn
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybrid_engine.config.checks import check_flag, check_integer, check_number
from hybrid_engine.generation.detokenize import end_token_ids
from hybrid_engine.generation.live.asynchronous import LiveThread
from hybrid_engine.generation.live.batches import LiveBatch
from hybrid_engine.generation.live.opening import live_batch
from hybrid_engine.generation.live.shared import LeadingBatch, LiveFollower, LiveLink
from hybrid_engine.generation.memory import read_memory
from hybrid_engine.generation.options import token_ids
from hybrid_engine.generation.rollout.generator import Generator
from hybrid_engine.serving.parsers import AUTO, choose_parser
from hybrid_engine.serving.request_parsing import ServedModel
from hybrid_engine.serving.sessions import (
    MAX_SESSION_BYTES,
    MAX_SESSION_TOKENS,
    Sessions,
    SessionSampling,
    Trajectory,
    check_session_ids,
    size_of,
)
from hybrid_engine.serving.web.access import BACKLOG, Keys, Pages, bind, check_address
from hybrid_engine.serving.web.app import App
from hybrid_engine.serving.web.connections import SECONDS_BETWEEN_REQUESTS, SECONDS_TO_TAKE, BoundedConnection
from hybrid_engine.serving.web.streaming import ProgressRouter

log = logging.getLogger(__name__)
MAX_WAITING = 1024
"""Default maximum number of sequences that wait to begin."""
POLL_SECONDS = 0.5
FINISH_SECONDS = 60.0
"""Default time for running requests to finish at the end."""
SECONDS_TO_ANSWER = 3
"""Additional time after that for ready answers and errors to be sent and read."""
MAX_SESSIONS = 100_000
"""Default maximum number of remembered conversations."""


class Server:
    """Serves a model's live batch from `start()` to `close()`; a context manager does both.

    Args:
        opening: opens the batch on the server's own thread.
        name, tokenizer, vocab_size, end_tokens, suppressed: of the model, see `ServedModel`.
        host, port: address to listen at; port 0 takes a free one.
        tool_call_parser: parser of tool calls in answers: one of `parsers.PARSERS`.
        api_key: the key that clients must send. Required for every address that other machines can reach.
        api_key_file: a file of several named keys (`access.Keys`), instead; `reload_keys` reads it again.
        allow_hosts, allow_origins: for requests without a key, see `access.Pages`.
        max_waiting: sequences that may wait to begin; further ones are answered with 429.
        max_sessions: number of remembered conversations; beyond it the oldest are forgotten.
        max_session_tokens: the same limit for the tokens of all their answers, each counted from the start of its
            conversation.
        max_session_bytes: the same limit for the memory of everything remembered, tokens and messages.
        stall_seconds: time in which a client must read some of a waiting answer, or is dropped.
        session_ids: the only conversations that are accepted and recorded; None: any id starts one.
        session_sampling: how the answers of sessions are drawn, whatever their requests say; None: as they say.
        finish_seconds: time for running requests to finish at the end; then their clients get an error.
        version: version of the weights, which is recorded for tokens.
        link: link to the processes that share the model and follow this one.
        adapters: maps names for clients to peft's adapters of the model, each served as a separate model.
        record_supports: whether the sampler's supports are recorded in trajectories, whose log-probabilities are then
            of the filtered distributions, as are those that clients are sent; otherwise they are unfiltered.
    """

    def __init__(
        self,
        opening: Callable[[], AbstractContextManager[LiveBatch]],
        *,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        end_tokens: list[int],
        suppressed: tuple[int, ...] = (),
        host: str = "127.0.0.1",
        port: int = 0,
        tool_call_parser: str = AUTO,
        api_key: str | None = None,
        api_key_file: str | Path | None = None,
        allow_hosts: Collection[str] = (),
        allow_origins: Collection[str] = (),
        max_waiting: int = MAX_WAITING,
        max_sessions: int = MAX_SESSIONS,
        max_session_tokens: int = MAX_SESSION_TOKENS,
        max_session_bytes: int = MAX_SESSION_BYTES,
        stall_seconds: float = SECONDS_TO_TAKE,
        session_ids: Collection[str] | None = None,
        session_sampling: SessionSampling | None = None,
        finish_seconds: float = FINISH_SECONDS,
        version: int = 0,
        link: LiveLink | None = None,
        adapters: Mapping[str, str] | None = None,
        record_supports: bool = False,
    ):
        check_integer("port", port, 0, 65535)
        check_integer("max_waiting", max_waiting, 1)
        check_integer("max_sessions", max_sessions, 1)
        check_integer("max_session_tokens", max_session_tokens, 1)
        check_integer("max_session_bytes", max_session_bytes, size_of(1, 1, 0).num_bytes)
        check_number("stall_seconds", stall_seconds, 0.1)
        check_number("finish_seconds", finish_seconds, 0)
        check_session_ids(session_ids, max_sessions)
        check_flag("record_supports", record_supports)
        self.keys, self._pages = Keys(api_key, api_key_file), Pages(allow_hosts, allow_origins)
        check_address(host, has_keys=bool(self.keys))
        self._pages.check_needed(has_keys=bool(self.keys))
        self.host, self.port = host, port
        self.version, self.finish_seconds, self.stall_seconds = version, finish_seconds, stall_seconds
        self._bounds = max_sessions, max_session_tokens, session_ids, max_session_bytes, session_sampling
        self._facts: dict[str, Any] = {
            "name": name,
            "tokenizer": tokenizer,
            "vocab_size": vocab_size,
            "end_tokens": end_tokens,
            "suppressed": suppressed,
            "adapters": dict(adapters or {}),
            "record_supports": record_supports,
        }
        self._facts["tool_call_parser"] = choose_parser(tool_call_parser, tokenizer)
        self._link = link
        self.router = ProgressRouter()
        self.worker = LiveThread(opening, self.router.publish, max_waiting)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The `base_url` for the `openai` client."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def start(self) -> "Server":
        """Binds the address, opens the batch and answers requests; raises the error that prevents it."""
        listener = self._bind()
        try:
            self.port = listener.getsockname()[1]
            if self._link is not None:
                self._link.send(self.url)
                self._link.share_tokenizer(self._facts["tokenizer"])
            self.worker.start()
        except BaseException:
            listener.close()
            raise
        assert self.worker.batch is not None
        model = ServedModel(  # type: ignore[arg-type]
            longest=self.worker.batch.longest,
            created=int(time.time()),
            max_answers=self.worker.max_waiting,
            **self._facts,
        )
        self.sessions = Sessions(model, self.version, *self._bounds)
        self.app = App(model, self.worker, self.router, self.sessions, keys=self.keys, pages=self._pages)
        config = uvicorn.Config(
            self.app.asgi,
            http=partial(BoundedConnection, stall_seconds=self.stall_seconds),  # type: ignore[arg-type]
            ws="none",
            log_level="warning",
            access_log=False,
            lifespan="off",
            backlog=BACKLOG,
            timeout_keep_alive=int(SECONDS_BETWEEN_REQUESTS),
            timeout_graceful_shutdown=int(self.finish_seconds) + SECONDS_TO_ANSWER,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="hybrid-engine-http", daemon=True
        )
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.001)
        return self

    def _bind(self) -> socket.socket:
        if self._link is None:
            return bind(self.host, self.port)
        listener = self._link.led(partial(bind, self.host, self.port))
        assert listener is not None
        return listener

    def trajectories(self) -> list[Trajectory]:
        """The conversations so far, for training; also after `close()`."""
        return self.sessions.trajectories()

    def client(self) -> Any:
        """An `openai.OpenAI` connected to this server; ValueError if the package is not installed."""
        return build_client(self.url, self.keys.first)

    @property
    def api_key(self) -> str | None:
        """The key for clients that play episodes here; of a key file, the first client's. None if there is none."""
        return self.keys.first

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return str(self._facts["name"])

    @property
    def num_running(self) -> int:
        """Number of answers that are being generated."""
        return self.worker.num_running

    def reload_keys(self) -> None:
        """Reads the key file again; if it is invalid, keeps the old keys and logs the reason."""
        try:
            self.keys.read_again()
        except ValueError as error:
            log.warning("serving: the keys stay as they were: %s", error)

    def wait(self, ending: threading.Event) -> None:
        """Returns when `ending` is set, or the model has failed."""
        while not ending.wait(POLL_SECONDS) and self.worker.error is None:
            pass

    def close(self) -> None:
        """Accepts no new requests, finishes running ones within `finish_seconds`, and frees all resources."""
        self._let_followers_leave()
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(self.finish_seconds)
            if self._thread.is_alive():
                self.worker.drop()
                self._thread.join()
            self.app.close()
        try:
            self.worker.close()
        finally:
            if self._link is not None:
                self._link.guides.close()
        if self._link is not None:
            self._link.send([replace(trajectory, sequence=None, parent=None) for trajectory in self.trajectories()])

    def _let_followers_leave(self) -> None:
        """Waits for following processes that may still send requests to this server."""
        batch = self.worker.batch
        while isinstance(batch, LeadingBatch) and batch.is_needed and self.worker.error is None:
            time.sleep(POLL_SECONDS / 10)

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FollowingServer:
    """Takes the place of the leader's Server: has the same address, but no web server.

    Args:
        opening: opens this process's live batch, on a separate thread.
        name: the model's name for clients.
        keys: the keys that the leader's clients must send.
    """

    def __init__(
        self,
        opening: Callable[[], AbstractContextManager[LiveBatch]],
        link: LiveLink,
        *,
        name: str,
        keys: Keys,
    ):
        self.name, self.keys, self.url = name, keys, ""
        self.worker = LiveFollower(opening, link)
        self._link = link
        self._trajectories: list[Trajectory] | None = None

    def start(self) -> "FollowingServer":
        """Joins the leader's `Server.start`; raises the error that prevents it."""
        self._link.led(_nothing)
        self.url = self._link.receive()
        self._link.share_tokenizer(None)
        self.worker.start()
        return self

    def client(self) -> Any:
        """An `openai.OpenAI` connected to the leader; ValueError if the package is not installed."""
        return build_client(self.url, self.keys.first)

    @property
    def api_key(self) -> str | None:
        """The key for clients that play episodes; None if the leader needs none."""
        return self.keys.first

    num_running = 0
    """Number of running requests that came to this process."""

    def wait(self, ending: threading.Event) -> None:
        """Returns at once: the leader waits, and `close()` waits for the leader."""

    def trajectories(self) -> list[Trajectory]:
        """The leader's conversations, after `close()`; ValueError before."""
        if self._trajectories is None:
            raise ValueError(
                f"trajectories(): they are on rank {self._link.leader}, which is asked; call it there, or after serving"
            )
        return self._trajectories

    def close(self) -> None:
        """Waits until the leader has ended; raises errors that occurred meanwhile."""
        try:
            self.worker.close()
        finally:
            self._link.guides.close()
        self._trajectories = self._link.receive()

    def __enter__(self) -> "FollowingServer":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _nothing() -> None:
    pass


def build_server(
    module: nn.Module,
    generator: Generator,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    longest: int | None,
    max_running: int | None,
    model_name: str | None,
    adapters: Mapping[str, str] | None = None,
    memory: float | str | None = None,
    **options: Any,
) -> Server | FollowingServer:
    """A Server that `start()` starts; `options` are its own. Collective if processes share the model.

    The first of these processes serves the model, and the others get a FollowingServer.

    Args:
        module: the unmodified transformers model.
        generator: runs the model.
        tokenizer: None loads it from the folder or hub name that the model was loaded from.
        longest, max_running: as `live_batch` takes them.
        model_name: None takes the last part of that folder or hub name, or "policy".
        adapters: maps names for clients to adapters of a `PeftModel`; None: the active adapter is the model.
        memory: for keys and values of the answers, as `read_memory` takes it.

    Raises:
        ValueError: there is no tokenizer, or an option is out of range.
    """
    source = str(getattr(module.config, "name_or_path", "") or "")
    vocab_size = module.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    link = LiveLink(generator.group) if generator.group.size > 1 else None
    name = model_name or Path(source).name or "policy"
    check_adapters(module, adapters or {}, name)
    shape = longest, max_running, link, tuple((adapters or {}).values())
    limit = read_memory(memory, generator.device.type)
    if memory is not None and generator.model is None:
        raise ValueError(
            f"memory={memory}: {generator.fallback_reason}, and the model's own generate() allocates memory as needed; "
            "leave it out"
        )
    opening = partial(live_batch, generator, *shape, memory=limit)

    def build() -> Server:
        defaults: Any = module.generation_config
        served = load_tokenizer(source) if tokenizer is None else tokenizer
        return Server(
            opening,
            name=name,
            tokenizer=served,
            vocab_size=vocab_size,
            end_tokens=end_token_ids(module, served),
            suppressed=token_ids("suppress_tokens", defaults.suppress_tokens, vocab_size),
            link=link,
            adapters=adapters,
            **options,
        )

    if link is None:
        return build()
    keys = Keys(options.get("api_key"), options.get("api_key_file"))
    return link.led(build) or FollowingServer(opening, link, name=name, keys=keys)


def check_adapters(module: nn.Module, adapters: Mapping[str, str], model_name: str) -> None:
    """Raises ValueError if `adapters`, which maps clients' names to peft's, cannot be served with the base model."""
    known = list(getattr(module, "peft_config", {}))
    for name, adapter in adapters.items():
        if adapter not in known:
            raise ValueError(f"adapters: the model has no adapter {adapter!r}; it has {', '.join(known) or 'none'}")
        if name == model_name:
            raise ValueError(f"adapters: {name!r} is the name of the base model; pass another name, or model_name")


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of `source`, a folder or hub name; raises ValueError if it has none."""
    if not source:
        raise ValueError("serving(): the model was not loaded from a folder or name; pass tokenizer")
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"serving(): {source} has no tokenizer that loads ({error}); pass tokenizer") from error


def build_client(url: str, api_key: str | None) -> Any:
    """An `openai.OpenAI` for `url`; ValueError if the package is not installed.

    It retries if the connection breaks or the server is overloaded.
    """
    try:
        openai = importlib.import_module("openai")
    except ModuleNotFoundError as error:
        raise ValueError(
            "client(): openai is not installed; install the extra: pip install 'hybrid-engine[agents]'"
        ) from error
    return openai.OpenAI(base_url=url, api_key=api_key or "none")
