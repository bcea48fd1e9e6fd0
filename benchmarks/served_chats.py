"""Chats with servers that are processes of their own: seconds to the first token, and tokens per second.

`bench_serving.py --vllm PYTHON` measures `hybrid-engine serve` and vLLM's server with it, in turn. As many clients as
chats at once, each with one chat after the other, so that prompts come while others decode. Clients are one process of
bare sockets, and as lean as can be.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from transformers import PreTrainedTokenizerBase

SECONDS_TO_START = 1200
WORD = re.compile("Ġ[a-z]{3,}")
"""A token that is a whole word after a space, in the vocabularies of byte-level BPE."""


@dataclass(frozen=True)
class Chat:
    """A chat of one turn."""

    text: str
    num_new: int
    """Tokens of its answer."""


@dataclass
class ChatRun:
    """What clients and server took for all chats."""

    seconds: float
    cpu_seconds: float
    """CPU seconds of the server's processes."""
    first: list[float] = field(default_factory=list)
    """Seconds from each request to its first token."""
    first_cpu: list[float] = field(default_factory=list)
    """CPU seconds that the server's processes took meanwhile, which other programs of the machine hardly change."""
    between: list[float] = field(default_factory=list)
    """Seconds from an event with tokens to the next, shared by its tokens."""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    answers: dict[str, list[int]] = field(default_factory=dict)
    """Token ids of the answer to each text."""

    @property
    def rate(self) -> float:
        """Tokens of answers per second."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class ChatServer:
    """A running server."""

    name: str
    url: str
    process: psutil.Process

    def cpu_seconds(self) -> float:
        """CPU seconds of all its processes so far."""
        times = [each.cpu_times() for each in (self.process, *self.process.children(recursive=True))]
        return sum(each.user + each.system for each in times)


def build_chats(
    tokenizer: PreTrainedTokenizerBase, seed: int, num: int, prompt_tokens: int, new_tokens: int
) -> list[Chat]:
    """Chats of random words, one token each: texts from half of `prompt_tokens` to all, answers from an eighth."""
    rng = random.Random(seed)
    words = sorted(token[1:] for token in tokenizer.get_vocab() if WORD.fullmatch(token))

    def text() -> str:
        return " ".join(rng.choices(words, k=rng.randint(prompt_tokens // 2, prompt_tokens)))

    return [Chat(text(), rng.randint(max(1, new_tokens // 8), new_tokens)) for _ in range(num)]


def hybrid_engine_command(model: str, port: int, num_clients: int, longest: int, dtype: str) -> list[str]:
    """The command of this project's server."""
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    limits = ["--max-running", str(num_clients), "--longest", str(longest), "--max-waiting", str(num_clients)]
    command = [sys.executable, "-m", "hybrid_engine.cli.cli", "serve", "--model", model, "--model-name", "chat"]
    return [*command, "--port", str(port), "--dtype", names[dtype], *limits]


def vllm_command(python: str, model: str, port: int, num_clients: int, longest: int, dtype: str) -> list[str]:
    """The command of vLLM's server; chunked prefill is its default."""
    limits = ["--max-num-seqs", str(num_clients), "--max-model-len", str(longest)]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "chat"]
    return [*command, "--port", str(port), "--dtype", dtype, "--disable-log-stats", *limits]


@contextlib.contextmanager
def running_server(name: str, command: list[str], port: int, threads: int, log: Path) -> Iterator[ChatServer]:
    """A server of these threads from its first /health on; it is ended at the exit."""
    memory = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}  # GiB; the others' are not read
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)} | memory
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    server = ChatServer(name, f"http://127.0.0.1:{port}", psutil.Process(process.pid))
    try:
        end = time.monotonic() + SECONDS_TO_START
        while not _is_healthy(server.url):
            if time.monotonic() > end or process.poll() is not None:
                raise RuntimeError(f"{name} does not answer at {server.url}; its output is in {log}")
            time.sleep(0.5)
        yield server
    finally:
        children = server.process.children(recursive=True) if process.poll() is None else []
        process.terminate()
        process.wait(60)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def _is_healthy(url: str) -> bool:
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    return False


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_chats(server: ChatServer, chats: list[Chat], num_clients: int) -> ChatRun:
    """Has `num_clients` at once ask one chat after the other."""

    async def ask_all() -> list[Answer]:
        answers, coming = [], iter(chats)

        async def client() -> None:
            for chat in coming:
                answers.append(await _ask(server, chat))

        await asyncio.gather(*(client() for _ in range(num_clients)))
        return answers

    begin, cpu = time.perf_counter(), server.cpu_seconds()
    answers = asyncio.run(ask_all())
    run = ChatRun(time.perf_counter() - begin, server.cpu_seconds() - cpu)
    for answer in answers:
        _read(run, answer)
    return run


@dataclass
class Answer:
    """A streamed answer as it came."""

    chat: Chat
    begin: float
    """When it was asked for."""
    begin_cpu: float
    """CPU seconds of the server by then."""
    first_cpu: float | None = None
    """CPU seconds of the server by the first token."""
    lines: list[tuple[float, bytes]] = field(default_factory=list)
    """Lines that may hold JSON, with the time of each."""


async def _ask(server: ChatServer, chat: Chat) -> Answer:
    answer, place = Answer(chat, time.perf_counter(), server.cpu_seconds()), urlsplit(server.url)
    body = {
        "model": "chat",
        "messages": [{"role": "user", "content": chat.text}],
        "max_tokens": chat.num_new,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=2**24)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close"
    )
    writer.write(f"{head}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    async for line in reader:
        if b"{" in line:
            answer.lines.append((time.perf_counter(), line))
            if answer.first_cpu is None and b'"token_ids":[' in line:
                answer.first_cpu = server.cpu_seconds()
    writer.close()
    return answer


def _read(run: ChatRun, answer: Answer) -> None:
    """Adds one answer to `run`."""
    latest = answer.begin
    tokens: list[int] = []
    for now, line in answer.lines:
        event = json.loads(line.removeprefix(b"data: "))
        if "choices" not in event:
            raise RuntimeError(f"the server answered {event}")
        new = (event["choices"][0].get("token_ids") or []) if event["choices"] else []
        if new and not tokens:
            run.first.append(now - latest)
        elif new:
            run.between += [(now - latest) / len(new)] * len(new)
        latest = now if new else latest
        tokens += new
        if event.get("usage") and not event["choices"]:
            run.num_prompt_tokens += event["usage"]["prompt_tokens"]
    if len(tokens) != answer.chat.num_new or answer.first_cpu is None:
        raise RuntimeError(f"{answer.chat.num_new} tokens were asked for, and {len(tokens)} came")
    run.first_cpu.append(answer.first_cpu - answer.begin_cpu)
    run.num_tokens += len(tokens)
    run.answers[answer.chat.text] = tokens


def summarize(runs: list[ChatRun]) -> dict[str, float]:
    """Columns of a row: medians of the runs, and percentiles of what the clients of all of them waited for."""
    row = {"tokens_per_second": round(statistics.median(run.rate for run in runs), 1)}
    row["cpu_s"] = round(statistics.median(run.cpu_seconds for run in runs), 2)
    for name, waits in (("first_token", "first"), ("first_token_cpu", "first_cpu"), ("between_tokens", "between")):
        cuts = statistics.quantiles([wait for run in runs for wait in getattr(run, waits)], n=100, method="inclusive")
        row |= {f"{name}_ms_p{share}": round(cuts[share - 1] * 1000, 1) for share in (50, 95)}
    return row
