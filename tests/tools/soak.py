"""A server under honest, clumsy and hostile clients at once: `make soak`.

    python tests/tools/soak.py --seconds 600                     # a small random model
    python tests/tools/soak.py --seconds 60 --model FOLDER --page runs/soak.md

`hybrid-engine serve` runs in a process of its own, at a loopback address, with a key for each kind of client. Honest
clients ask the same questions again and again, and every answer is compared with the one that the server gave when
nobody else asked. Beside them run clients that leave, read slowly, send half a request or nonsense, and those that ask
for as much as they can. It fails where an honest answer is lost or another, where an odd request gets another status
than it should, where memory grows after the first minute (WINDOW; with `--model` the first half), and where rows,
blocks or descriptors are not given back, or the server does not end in time. How long /health takes is told and fails
nothing. All clients are bounded in number, pace and time, and the program ends by itself.

Rows of a batch are multiplied together, so other requests change the last digits of fp32 logits. A small random model
is confident enough that no token depends on them. With a real one (`--model`) a draw among 50,000 tokens may fall on
another one by such digits, so its questions are greedy; and two tokens may be as likely as each other up to them. An
answer that differs from the one alone is therefore asked for again, alone, with a bias of NUDGE for its first other
token: if the answer alone then has this token too, rounding chose it, which the page tells; else the answer is wrong.
A real model also takes longer, and clients wait for it up to PATIENCE_WITH_MODEL.

Conversations are remembered up to 2 GiB, so requests that belong to one are sent in the first SESSION_SECONDS alone.
"""

import argparse
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from tests.support.served import Served, serving, write_model
from tests.tools.soak_page import PAGE, machine, table, write_section

NUM_HONEST = 4
SESSION_SECONDS = 40.0
"""From the beginning, in which requests belong to conversations; less of a short run."""
WINDOW = 60.0
"""Seconds after which memory is to be flat: its median in the first third after them and in the last third. With
`--model` half of the run, in which a real model makes fewer passes than the small one in a minute: libraries keep
something for each number of rows the first time they multiply it.
"""
MAY_GROW = 24 * 2**20
"""Bytes between those two medians."""
PATIENCE, PATIENCE_WITH_MODEL = 120.0, 600.0
"""Seconds for one answer of the small model and of one that `--model` names."""
NUDGE = 0.005
"""Bias for a token that rounding may have chosen; fp32 logits of a batch differ by a hundredth of it."""
MAY_DIFFER = 0.01
"""Between two log-probabilities of the same token."""
FINISH_SECONDS = 5
OPTIONS = (
    *("--longest", "512", "--max-running", "16", "--max-waiting", "128", "--finish-seconds", str(FINISH_SECONDS)),
    *("--dtype", "fp32"),  # on a GPU too, where bf16 is the default: other rows of a batch change its tokens
)
GIVES_BACK = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
"""glibc gives freed memory back then; else it keeps more of it in each minute, 200 MiB, which hides what grows."""
THREADS = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) - 1))}
"""The clients need a CPU. Threads of a product wait for each other, on two CPUs of which one is taken for milliseconds:
SmolLM2 drew 4 tokens a second then.
"""
KEYS = {"honest": "key-of-the-honest", "clumsy": "key-of-the-clumsy", "hostile": "key-of-the-hostile"}
METRICS_KEY = "key-of-metrics"
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


@dataclass
class Load:
    """What the clients of one run share.

    Args:
        served: the server.
        model: its name.
        longest: tokens of a prompt and its answer together.
        seconds: how long clients go on.
        may_round: whether rounding may choose another token.
        patience: seconds for one answer.
        window: seconds after which memory is to be flat.
    """

    served: Served
    model: str
    longest: int
    seconds: float
    may_round: bool = False
    patience: float = PATIENCE
    window: float = WINDOW
    begin: float = field(default_factory=time.monotonic)
    over: threading.Event = field(default_factory=threading.Event)
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Requests by kind of client and what came back."""
    failures: list[str] = field(default_factory=list)
    changed: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    """Answers that differ from the one alone, with the number of their question."""
    num_rounded: int = 0
    """Number of them in which rounding chose another token."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def root(self) -> str:
        """The address without /v1."""
        return self.served.url.removesuffix("/v1")

    @property
    def has_sessions(self) -> bool:
        """Whether requests may still belong to conversations."""
        return time.monotonic() - self.begin < min(SESSION_SECONDS, self.seconds / 2)

    def note(self, kind: str, outcome: object) -> None:
        """Counts a request."""
        with self.lock:
            self.sent[kind, str(outcome)] += 1

    def fail(self, what: str) -> None:
        """Notes that something is wrong; the first hundred are told."""
        with self.lock:
            if len(self.failures) < 100:
                self.failures.append(what)
                print(f"WRONG: {what[:500]}", flush=True)

    def post(self, path: str, body: Any, key: str, timeout: float | None = None) -> httpx.Response:
        """A request on a connection of its own."""
        headers = {"Authorization": f"Bearer {KEYS[key]}", "Content-Type": "application/json"}
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.root + path, content=raw, headers=headers, timeout=timeout or self.patience)


# Honest clients.


def build_questions(model: str, is_greedy: bool) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies whose answers do not depend on when they are asked."""
    text = {"model": model, "max_tokens": 24, "return_token_ids": True}
    chat = {"model": model, "max_tokens": 24, "return_token_ids": True}
    completions = [
        {"prompt": "Once upon a time", "temperature": 0},
        {"prompt": "Once upon a time", "seed": 1},
        {"prompt": ["one", "two", "three"], "seed": 2, "n": 2},
        {"prompt": "The end. " * 20, "temperature": 0, "ignore_eos": True},
        {"prompt": "logprobs", "seed": 3, "logprobs": 3, "echo": True},
        {"prompt": "score me", "echo": True, "logprobs": 0, "max_tokens": 0},
        {"prompt": "streamed", "seed": 4, "stream": True, "ignore_eos": True},
        {"prompt": "penalties", "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.5, "top_k": 20},
        {"prompt": "bias", "seed": 6, "logit_bias": {"40": 5, "41": -100}, "stop": ["e"]},
        {"prompt": "choose", "seed": 7, "guided_choice": ["yes", "no", "perhaps"]},
        {"prompt": "number", "seed": 8, "guided_regex": "[0-9]{1,9}"},
    ]
    say = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who are you?"}]
    chats = [
        {"messages": say, "temperature": 0},
        {"messages": say, "seed": 9, "n": 3},
        {"messages": say, "seed": 10, "stream": True},
        {"messages": say, "seed": 11, "logprobs": True, "top_logprobs": 2},
        {"messages": say, "seed": 12, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"messages": say, "seed": 13, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
    ]
    asked = [("/v1/completions", text | body) for body in completions]
    asked += [("/v1/chat/completions", chat | body) for body in chats]
    return [(path, body | {"temperature": 0}) for path, body in asked] if is_greedy else asked


def read_answer(answer: httpx.Response, is_streamed: bool) -> list[dict[str, Any]]:
    """The choices of an answer; those of a stream put together."""
    if not is_streamed:
        return [plain(choice) for choice in answer.json()["choices"]]
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    if events[-1:] != ["[DONE]"]:
        raise ValueError(f"the stream ends with {events[-1:]}")
    whole: dict[int, dict[str, Any]] = {}
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            known = whole.setdefault(choice["index"], {"text": "", "token_ids": [], "finish_reason": None})
            known["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            known["token_ids"] += choice.get("token_ids") or []
            known["finish_reason"] = choice["finish_reason"] or known["finish_reason"]
    return [whole[index] for index in sorted(whole)]


def plain(value: Any) -> Any:
    """The value without names of calls."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items() if name != "id"}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value


def is_alike(one: Any, other: Any) -> bool:
    """Whether two answers are the same up to MAY_DIFFER in their numbers."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_alike(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= MAY_DIFFER
    return bool(one == other)


def is_rounding(load: Load, web: httpx.Client, question: tuple[str, dict[str, Any]], alone: Any, said: Any) -> bool:
    """Whether rounding chose the first other token of each choice that differs; asked while nobody else asks."""
    path, body = question
    for place, (choice, other) in enumerate(zip(alone, said, strict=True)):
        if is_alike(choice, other):
            continue
        first, second = choice["token_ids"], other["token_ids"]
        length = next((n for n, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(second))
        if length == len(second):
            return False
        biases = body.get("logit_bias", {})
        token = str(second[length])
        nudged = ask(load, web, path, body | {"logit_bias": biases | {token: biases.get(token, 0) + NUDGE}})
        if nudged is None or nudged[place]["token_ids"][: length + 1] != second[: length + 1]:
            return False
    return True


def ask(load: Load, web: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """The answer's choices; asks again where the server says that it has too much to do. None: it is lost."""
    until = time.monotonic() + load.patience
    while True:
        answer = web.post(load.root + path, json=body)
        load.note("honest", answer.status_code)
        if answer.status_code != 429:
            break
        if time.monotonic() > until:
            load.fail(f"lost: told to come again for {load.patience:g} s: {path} {body}")
            return None
        time.sleep(float(answer.headers["Retry-After"]))
    if answer.status_code != 200:
        load.fail(f"lost: {answer.status_code} {answer.text[:300]} to {path} {body}")
        return None
    return read_answer(answer, bool(body.get("stream")))


def honest(load: Load, alone: list[Any], questions: list[tuple[str, dict[str, Any]]], number: int) -> None:
    """Asks questions in an order of its own, and compares."""
    order = random.Random(number)
    with web_client(load.patience) as web:
        while not load.over.is_set():
            place = order.randrange(len(questions))
            path, body = questions[place]
            if load.has_sessions and order.random() < 0.5:
                body = body | {"session_id": f"honest-{number}-{order.randrange(5)}-{place}"}
            try:
                said = ask(load, web, path, body)
            except Exception as error:
                load.fail(f"lost: {type(error).__name__}: {error}: {path} {body}")
                continue
            if said is not None and not is_alike(said, alone[place]):
                with load.lock:
                    load.changed.append((place, said))


def web_client(patience: float) -> httpx.Client:
    """A client with connections that it uses again."""
    return httpx.Client(timeout=patience, headers={"Authorization": f"Bearer {KEYS['honest']}"})


# Clumsy clients: each call is one misfortune.


def connect(load: Load, receives: int | None = None) -> socket.socket:
    """A connection, with a small buffer for what comes where `receives` says so."""
    place, opened = urlsplit(load.root), socket.socket()
    opened.settimeout(20)
    if receives is not None:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
    opened.connect((place.hostname, place.port))
    return opened


def raw_request(load: Load, body: dict[str, Any], key: str) -> bytes:
    """The bytes of a request for completions."""
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[key]}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw


def leave(load: Load, chance: random.Random) -> None:
    """Goes away after a few tokens of a stream, before any, or in the middle of a whole answer."""
    body = {"model": load.model, "prompt": "bye", "max_tokens": 200, "ignore_eos": True, "n": chance.choice([1, 4])}
    with connect(load) as opened:
        opened.sendall(raw_request(load, body | {"stream": chance.random() < 0.7}, "clumsy"))
        if chance.random() < 0.7:
            opened.settimeout(chance.random())
            with_timeout(lambda: opened.recv(1000))
    load.note("leavers", "left")


def read_slowly(load: Load, chance: random.Random) -> None:
    """Takes a stream some bytes at a time."""
    body = {"model": load.model, "prompt": "slow", "max_tokens": 60, "ignore_eos": True, "stream": True, "logprobs": 5}
    size, until = 0, time.monotonic() + 20
    with connect(load, receives=4096) as opened:
        opened.sendall(raw_request(load, body, "clumsy"))
        while time.monotonic() < until and not load.over.is_set():
            part = with_timeout(lambda: opened.recv(700))
            size += len(part or b"")
            if not part or b"[DONE]" in part:
                break
            time.sleep(0.02)
    load.note("slow readers", "read" if size else "nothing came")


def send_half(load: Load, chance: random.Random) -> None:
    """Sends the beginning of a request, waits for some seconds and goes away without a word."""
    whole = raw_request(load, {"model": load.model, "prompt": "half", "max_tokens": 2}, "clumsy")
    with connect(load) as opened:
        opened.sendall(whole[: chance.randrange(len(whole))])
        load.over.wait(chance.choice([0, 1, 5]))
        if chance.random() < 0.5:
            opened.shutdown(socket.SHUT_WR)
    load.note("half requests", "sent")


def be_odd(load: Load, chance: random.Random) -> None:
    """Sends one odd request, which must be refused."""
    path, body, status = chance.choice(odd_requests(load.model))
    answer = load.post(path, body, "clumsy")
    load.note("odd requests", answer.status_code)
    if answer.status_code != status or "error" not in answer.json():
        load.fail(f"odd: {answer.status_code} {answer.text[:200]} in place of {status}: {path} {str(body)[:300]}")


def odd_requests(model: str) -> list[tuple[str, Any, int]]:
    """Paths, bodies and the statuses that they must get."""
    text, chat = {"model": model, "prompt": "hi"}, {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    completions: list[Any] = [
        b"", b"{", b"[]", b"nan", b"\xff", b'{"model": NaN}', b"[" * 100_000, {}, {"model": model}, text | {"n": 0},
        text | {"n": 1.5}, text | {"max_tokens": -1}, text | {"max_tokens": 10**9}, text | {"temperature": "hot"},
        text | {"logit_bias": {"-1": 1}}, text | {"logit_bias": {"9999999": 1}}, text | {"stop": ""},
        text | {"prompt": []}, text | {"prompt": ""}, text | {"prompt": [10**9]}, text | {"unknown": 1},
        text | {"guided_regex": "("}, text | {"guided_regex": "a", "guided_choice": ["b"]}, text | {"best_of": 3},
        text | {"guided_json": {"type": "nothing"}}, text | {"session_id": "a" * 300}, text | {"top_p": 0},
    ]  # fmt: skip
    chats: list[Any] = [
        chat | {"messages": []}, chat | {"messages": "hi"}, chat | {"messages": [{"content": "hi"}]},
        chat | {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, chat | {"tool_choice": "required"},
        chat | {"top_logprobs": 2}, chat | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ]  # fmt: skip
    return [
        *(("/v1/completions", body, 400) for body in completions),
        *(("/v1/chat/completions", body, 400) for body in chats),
        ("/v1/completions", text | {"model": "another"}, 404),
        ("/v1/nothing", {}, 404),
        ("/v1/models", {}, 405),
        ("/v1/completions", text | {"prompt": "x" * (5 * 2**20)}, 413),
    ]


# Hostile clients: each call asks for as much as it can.


def ask_for_many(load: Load, chance: random.Random) -> None:
    """Prompts times n, far more answers than may wait."""
    body = {"model": load.model, "prompt": [[5]] * 8000, "n": 128, "max_tokens": 1}
    expect(load, "prompts times n", {400}, "/v1/completions", body)


def send_long_texts(load: Load, chance: random.Random) -> None:
    """A text that fits the body and no context."""
    text = ("word salad " * 400_000)[:3_900_000]
    if chance.random() < 0.5:
        body: dict[str, Any] = {"model": load.model, "messages": [{"role": "user", "content": text}]}
        expect(load, "long texts", {400}, "/v1/chat/completions", body)
    else:
        expect(load, "long texts", {400}, "/v1/completions", {"model": load.model, "prompt": text})


def ask_for_scores(load: Load, chance: random.Random) -> None:
    """The log-probabilities of a prompt, many times over: as large an answer as is served, and one that is not."""
    prompt = [5 + place % 200 for place in range(load.longest // 2)]
    body = {"model": load.model, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 20}
    expect(load, "large answers", {200, 429}, "/v1/completions", body | {"n": 16})
    expect(load, "large answers", {400}, "/v1/completions", body | {"n": 100})


def ask_for_guides(load: Load, chance: random.Random) -> None:
    """Guides that take long to read: choices that begin alike, schemas and expressions that blow up."""
    wide = {"type": "object", "properties": {f"p{place}": {"type": "string"} for place in range(300)}}
    guides = [
        {"guided_choice": [f"{chance.random()} word{place}" for place in range(5000)]},
        {"guided_choice": ["a"] * 20_000},
        {"guided_regex": f"({chance.randrange(99)}|(a|b|c){{1,200}}){{1,200}}x"},
        {"guided_regex": "(" * 1000 + "a" + ")" * 1000},
        {"guided_json": wide},
        {"guided_json": {"type": "integer", "multipleOf": 99999999 - chance.randrange(99)}},
        {"guided_grammar": "start: " + " | ".join(f'"{place}"' for place in range(2000))},
    ]
    body = {"model": load.model, "prompt": "x", "max_tokens": 2, "n": 8} | chance.choice(guides)
    expect(load, "guides", {200, 400, 429}, "/v1/completions", body)


def nest_deep(load: Load, chance: random.Random) -> None:
    """Arguments of calls, bodies and schemas that nest deep."""
    depth = chance.choice([150, 5000, 100_000])
    call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": '{"a":' * depth}}
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    body = {"model": load.model, "messages": [*said, {"role": "tool", "content": "1", "tool_call_id": "a"}]}
    expect(load, "deep values", {200, 400, 429}, "/v1/chat/completions", body | {"max_tokens": 1})


def read_nothing(load: Load, chance: random.Random) -> None:
    """Asks for a large answer and takes none of it for some seconds."""
    prompt = [5 + place % 200 for place in range(load.longest // 2)]
    body = {"model": load.model, "prompt": prompt, "n": 16, "max_tokens": 1, "echo": True, "logprobs": 20}
    with connect(load, receives=4096) as opened:
        opened.sendall(raw_request(load, body, "hostile"))
        load.over.wait(15)
    load.note("never readers", "left")


def fill_sessions(load: Load, chance: random.Random) -> None:
    """Conversations with fields that no template reads, and with ids that it guesses."""
    message = {"role": "user", "content": "hi", "note": "x" * 1_000_000}
    session = chance.choice(["honest-0-0-0", "episode-0", f"mine-{chance.random()}"]) if load.has_sessions else None
    body = {"model": load.model, "messages": [message], "max_tokens": 1, "session_id": session}
    expect(load, "session junk", {200, 429}, "/v1/chat/completions", body)


def be_a_stranger(load: Load, chance: random.Random) -> None:
    """Has no key, or that for metrics alone, or comes from a web page."""
    key = chance.choice(["", "Bearer", "Bearer wrong", f"Bearer {METRICS_KEY}", "Basic b25lOnR3bw==", "Bearer \u00e9"])
    headers = {"Authorization": key.encode("latin-1"), "Origin": b"https://evil.example", "Host": b"evil.example"}
    body = {"model": load.model, "prompt": "poison", "max_tokens": 1, "session_id": "honest-0-0-0"}
    path = chance.choice(["/v1/completions", "/v1/chat/completions", "/openapi.json", "/tokenize"])
    with httpx.Client(timeout=load.patience) as web:
        answer = web.get(load.root + path, headers=headers) if "json" in path else None
        answer = answer or web.post(load.root + path, json=body, headers=headers)
    load.note("strangers", answer.status_code)
    if answer.status_code != 401 or "access-control-allow-origin" in answer.headers:
        load.fail(f"a stranger at {path} got {answer.status_code} {answer.text[:200]}")


def flood(load: Load, chance: random.Random) -> None:
    """As many long answers as one request may have."""
    body = {"model": load.model, "prompt": "flood", "n": 64, "max_tokens": 100, "ignore_eos": True}
    expect(load, "floods", {200, 429}, "/v1/completions", body)


def expect(load: Load, kind: str, statuses: set[int], path: str, body: Any) -> None:
    """Sends a request of a hostile client; it fails where the status is none of `statuses`."""
    answer = load.post(path, body, "hostile")
    load.note(kind, answer.status_code)
    if answer.status_code not in statuses:
        load.fail(f"{kind}: {answer.status_code} {answer.text[:300]}")


def with_timeout(read: Callable[[], bytes]) -> bytes | None:
    """What `read` brings; None where nothing comes in time or the connection is closed."""
    try:
        return read()
    except OSError:
        return None


DISTURBERS: list[tuple[Callable[[Load, random.Random], None], float]] = [
    (leave, 0.3), (read_slowly, 0.5), (send_half, 0.5), (be_odd, 0.1), (ask_for_many, 2), (send_long_texts, 2),
    (ask_for_scores, 8), (ask_for_guides, 3), (nest_deep, 1), (read_nothing, 8), (fill_sessions, 1),
    (be_a_stranger, 0.2), (flood, 10),
]  # fmt: skip
"""Each runs on a thread of its own, with a pause of up to so many seconds between two calls."""


def disturb(load: Load, call: Callable[[Load, random.Random], None], pause: float, number: int) -> None:
    """Makes one kind of trouble until the end."""
    chance = random.Random(1000 + number)
    while not load.over.wait(pause * chance.random()):
        try:
            call(load, chance)
        except (httpx.TimeoutException, httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError) as error:
            load.note(call.__name__, type(error).__name__)
            load.fail(f"{call.__name__}: {type(error).__name__}: {error}")
        except (httpx.WriteError, OSError) as error:  # the server closes what is too large before all of it is there
            load.note(call.__name__, type(error).__name__)


# What the server takes meanwhile.


@dataclass
class Watch:
    """Samples of the server, with the seconds since the beginning."""

    load: Load
    memory: list[tuple[float, int]] = field(default_factory=list)
    """Resident bytes of the process and those that it started."""
    health: list[float] = field(default_factory=list)
    """Seconds that /health took."""

    def run(self) -> None:
        """Looks ten times a second for the health, and twice for memory."""
        looks = 0
        with httpx.Client(timeout=PATIENCE) as web:
            while not self.load.over.wait(0.1):
                begin = time.monotonic()
                try:
                    status = web.get(f"{self.load.root}/health").status_code
                except httpx.HTTPError as error:
                    self.load.fail(f"/health: {type(error).__name__}: {error}")
                    continue
                self.health.append(time.monotonic() - begin)
                if status != 200:
                    self.load.fail(f"/health: {status}")
                looks += 1
                if looks % 5 == 0:
                    self.memory.append((begin - self.load.begin, resident_bytes(self.load)))

    def medians(self) -> tuple[int, int] | None:
        """Of memory in the first and the last third after the window; None where the run was too short."""
        later = [size for seconds, size in self.memory if seconds > self.load.window]
        third = len(later) // 3
        if third < 10:
            return None
        return int(statistics.median(later[:third])), int(statistics.median(later[-third:]))

    def minutes(self) -> list[int]:
        """The median of memory in each minute, in MiB."""
        parts: dict[int, list[int]] = {}
        for seconds, size in self.memory:
            parts.setdefault(int(seconds // 60), []).append(size)
        return [round(statistics.median(part) / 2**20) for part in parts.values()]

    def at(self, share: float) -> float:
        """Milliseconds that so large a share of the calls of /health took at most."""
        ordered = sorted(self.health) or [0.0]
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def resident_bytes(load: Load) -> int:
    """Memory of the server's process."""
    return psutil.Process(load.served.process.pid).memory_info().rss


def num_descriptors(load: Load) -> int:
    """Open files and sockets of the server's process."""
    return psutil.Process(load.served.process.pid).num_fds()


def gauges(load: Load) -> dict[str, float]:
    """Rows and blocks that the server says it uses."""
    text = httpx.get(f"{load.root}/metrics", headers={"Authorization": f"Bearer {METRICS_KEY}"}, timeout=PATIENCE).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    names = ("running_sequences", "waiting_sequences", "kv_blocks_used")
    return {name: float(values[f"hybrid_engine_{name}"]) for name in names}


def settled(load: Load, most_descriptors: int) -> dict[str, float]:
    """What is still used a while after all clients have gone; all zero where everything was given back."""
    for _ in range(600):
        left = gauges(load) | {"descriptors": max(0, num_descriptors(load) - most_descriptors)}
        if not any(left.values()):
            break
        time.sleep(0.1)
    return left


# The run.


def soak(load: Load) -> Watch:
    """Runs all clients for the time that there is, and sees what they leave."""
    questions = build_questions(load.model, load.may_round)
    with web_client(load.patience) as web:
        alone = [ask(load, web, *question) for question in questions]
        again = [ask(load, web, *question) for question in questions]
    if not is_alike(alone, again):
        load.fail("answers differ with nobody else there")
    most_descriptors = num_descriptors(load) + 1  # a connection of `gauges`
    load.sent.clear()
    load.begin = time.monotonic()
    watch = Watch(load)
    jobs: list[Callable[[], None]] = [watch.run]
    jobs += [partial(honest, load, alone, questions, number) for number in range(NUM_HONEST)]
    jobs += [partial(disturb, load, *kind, number) for number, kind in enumerate(DISTURBERS)]
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    while time.monotonic() - load.begin < load.seconds and load.served.process.poll() is None:
        time.sleep(0.5)
    load.over.set()
    for thread in threads:
        thread.join(2 * load.patience)
    if any(thread.is_alive() for thread in threads):
        load.fail("a client still waits for its answer")
    if load.served.process.poll() is not None:
        load.fail(f"the server has ended: {load.served.log.read_text()[-3000:]}")
        return watch
    judge(load, alone, questions)
    left = settled(load, most_descriptors)
    if any(left.values()):
        load.fail(f"not given back: {left}")
    medians = watch.medians()
    if medians is not None and medians[1] - medians[0] > MAY_GROW:
        load.fail(f"memory grew from {medians[0] / 2**20:.0f} to {medians[1] / 2**20:.0f} MiB after {load.window:g} s")
    return watch


def judge(load: Load, alone: list[Any], questions: list[tuple[str, dict[str, Any]]]) -> None:
    """Says of each answer that differs from the one alone whether rounding may have chosen another token."""
    with web_client(load.patience) as web:
        for place, said in load.changed:
            if load.may_round and is_rounding(load, web, questions[place], alone[place], said):
                load.num_rounded += 1
            else:
                load.fail(f"changed: {questions[place]}: {said} in place of {alone[place]}")


def end(load: Load) -> float:
    """Seconds until the server has ended, while an answer runs, of which the client must hear."""
    told: deque[int] = deque()
    body = {"model": load.model, "prompt": "end", "n": 64, "max_tokens": load.longest - 40, "ignore_eos": True}
    asking = threading.Thread(target=lambda: told.append(load.post("/v1/completions", body, "honest").status_code))
    asking.start()
    time.sleep(0.5)
    begin = time.monotonic()
    load.served.process.send_signal(signal.SIGTERM)
    try:
        code = load.served.process.wait(FINISH_SECONDS + 30)
    except Exception:
        load.fail("the server does not end")
        return -1.0
    seconds = time.monotonic() - begin
    asking.join(PATIENCE)
    if seconds > FINISH_SECONDS + 5 or code != 0:
        load.fail(f"the server ended after {seconds:.1f} s with {code}")
    if list(told) not in ([200], [503]):
        load.fail(f"the client of the last answer got {list(told)}")
    if "Traceback" in load.served.log.read_text():
        load.fail(f"a traceback in the log: {load.served.log.read_text()[-3000:]}")
    return seconds


def report(load: Load, watch: Watch, seconds_to_end: float, model: str) -> str:
    """The section of the page."""
    kinds = sorted({kind for kind, _ in load.sent})
    rows = []
    for kind in kinds:
        outcomes = sorted((outcome, count) for (other, outcome), count in load.sent.items() if other == kind)
        rows.append((kind, sum(count for _, count in outcomes), ", ".join(f"{name}: {num}" for name, num in outcomes)))
    answered = sum(count for (kind, outcome), count in load.sent.items() if (kind, outcome) == ("honest", "200"))
    medians = watch.medians()
    by_minute = ", ".join(map(str, watch.minutes()))
    flat = "too short a run to say" if medians is None else " and ".join(f"{size / 2**20:.0f}" for size in medians)
    sizes = [size / 2**20 for _, size in watch.memory] or [0]
    rounded = f" In {load.num_rounded} of them rounding chose another token." if load.num_rounded else ""
    except_those = ", except those below" if any("given back" in failure for failure in load.failures) else ""
    return (
        f"{load.seconds:.0f} seconds of `make soak` against {model}. {machine()}\n\n"
        f"{table(('client', 'requests', 'what came back'), rows)}\n"
        f"{answered:,} honest answers, each compared with the one alone.{rounded} Wrong: {len(load.failures)}.\n\n"
        f"- Memory of the server: at most {max(sizes):.0f} MiB; medians of the first and the last third after "
        f"{load.window:g} s: {flat}{' MiB' if medians else ''}; of each minute: {by_minute}\n"
        f"- `/health`: {len(watch.health):,} calls, {watch.at(0.5):.0f} ms in the median, {watch.at(0.99):.0f} ms at "
        f"the 99th percentile, {watch.at(1):.0f} ms at most, on a machine whose {os.cpu_count()} cores the clients "
        f"use as well (load {os.getloadavg()[0]:.1f})\n"
        f"- Rows, KV blocks and descriptors were given back{except_those}; the server ended {seconds_to_end:.1f} s "
        f"after SIGTERM, with `--finish-seconds {FINISH_SECONDS}`\n"
        + "".join(f"- WRONG: {failure[:300]}\n" for failure in load.failures[:20])
    )


def build_model(folder: str | None, scratch: Path) -> tuple[Path, str]:
    """The folder of the model to serve, and what the page calls it."""
    if folder is not None:
        return Path(folder), f"`{Path(folder).name}`"
    write_model(scratch / "tiny")
    return scratch / "tiny", "a small random Llama"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--model", help="a folder; default: a small random one")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model, described = build_model(options.model, scratch)
        keys = scratch / "keys"
        keys.touch(0o600)
        keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()) + f"monitor {METRICS_KEY} metrics\n")
        with serving(
            model, scratch / "log", "--api-key-file", str(keys), *OPTIONS, environment=GIVES_BACK | THREADS
        ) as served:
            with web_client(PATIENCE) as web:
                card = web.get(f"{served.url}/models").json()["data"][0]
            load = Load(served, card["id"], card["max_model_len"], options.seconds)
            if options.model is not None:
                load.may_round, load.patience, load.window = True, PATIENCE_WITH_MODEL, options.seconds / 2
            watch = soak(load)
            seconds_to_end = end(load)
    text = report(load, watch, seconds_to_end, described)
    options.page.parent.mkdir(parents=True, exist_ok=True)
    title = "Honest, clumsy and hostile clients" + (" of a real model" if options.model else "")
    write_section(title, text, options.page)
    print(text)
    return int(bool(load.failures))


if __name__ == "__main__":
    sys.exit(main())
