"""The server against `engine.generate()` on the same prompts, and how long its clients wait for tokens.

    python benchmarks/bench_serving.py --threads 2
    python benchmarks/bench_serving.py --prompts 64 --new-tokens 128 --transformers PYTHON
    python benchmarks/bench_serving.py --threads 2 --prompts 64 --prompt-tokens 128 --new-tokens 64 \\
        --vllm PYTHON --model FOLDER

As many clients as prompts, each with one request: prompts of mixed lengths, answers of mixed lengths without an end. In
each repeat every way runs once, in turn: all prompts in one `generate()` with a length for each row, then through the
server whole, then streamed. Before anything is timed the server's tokens are compared with those of `generate()`.

The clients are a process of their own on the same machine, and as lean as can be; where there are few cores they and
the model take them from each other. So the seconds of CPU are told too: of the process with model and server, and of
the clients. With `--transformers`, an interpreter that has `transformers[serving]`, its server answers prompts of
the same lengths as text, and so does this one. It is measured without continuous batching, with which it did not
answer on a CPU.

With `--vllm`, an interpreter that has vLLM, nothing of this is measured but `hybrid-engine serve` beside vLLM's server,
both of the model in `--model`, with the same chats in turn (`served_chats.py`). Each has all threads while the other
one waits. Before anything is timed, greedy answers of both are compared.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from common import DTYPES, RESULTS, Shape, append_rows, base_parser, environment, llama_config, parse
from rich.console import Console
from rich.table import Table
from served_chats import (
    ChatRun,
    build_chats,
    free_port,
    hybrid_engine_command,
    run_chats,
    running_server,
    summarize,
    vllm_command,
)
from transformers import AutoTokenizer, LlamaForCausalLM

import hybrid_engine
from hybrid_engine.rlhf.tasks.corpus import train_tokenizer

SECONDS_TO_START = 180
COMPARED = ("transformers_serve_tokens_per_second", "of_transformers_serve")


@dataclass(frozen=True)
class Work:
    """What every way answers."""

    prompts: list[Any]
    """Token ids, or text."""
    lengths: list[int]
    """Tokens of each answer."""

    @property
    def num_tokens(self) -> int:
        """Of all answers."""
        return sum(self.lengths)


@dataclass
class Run:
    """What one way took."""

    seconds: float
    cpu_seconds: float = 0.0
    """Of the process with the model."""
    client_cpu_seconds: float = 0.0
    answers: list[list[int]] = field(default_factory=list)
    num_tokens: int = 0
    first: list[float] = field(default_factory=list)
    """Seconds from each request to its first token."""
    between: list[float] = field(default_factory=list)
    """Seconds from a token to the next; those that came together share the time since the last that came."""


def build_engine(shape: Shape, args: argparse.Namespace) -> Any:
    """Equal weights each time."""
    torch.manual_seed(0)
    config = llama_config(shape, shape.positions, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    model = LlamaForCausalLM(config).to(DTYPES[args.dtype]).to(args.device)
    options = {"enabled": True, "max_out_tokens": shape.positions, "print_latency": False, "max_running": shape.prompts}
    engine, *_ = hybrid_engine.initialize(
        model=model,
        config={
            "train_batch_size": 1,
            "optimizer": {"type": "AdamW"},
            "bf16": {"enabled": args.dtype == "bfloat16"},
            "hybrid_engine": options,
        },
    )
    return engine.eval()


def build_work(shape: Shape) -> Work:
    """Prompts from half the length to all of it, answers from an eighth."""
    rng = random.Random(0)
    longest, most = shape.prompt_tokens, shape.new_tokens
    prompts = [
        [rng.randrange(1, shape.vocab) for _ in range(rng.randint(longest // 2, longest))] for _ in range(shape.prompts)
    ]
    return Work(prompts, [rng.randint(max(1, most // 8), most) for _ in prompts])


def generate(engine: Any, work: Work, device: str) -> Run:
    """One call."""
    width = max(map(len, work.prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in work.prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in work.prompts], device=device)
    rows = [{"max_new_tokens": length} for length in work.lengths]
    begin, cpu = time.perf_counter(), time.process_time()
    output = engine.generate(ids, attention_mask=mask, do_sample=False, row_options=rows, max_new_tokens=1)
    answers = [row[:length] for row, length in zip(output[:, width:].tolist(), work.lengths, strict=True)]
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    return Run(seconds, cpu_seconds, answers=answers, num_tokens=work.num_tokens)


async def post(url: str, body: dict[str, Any]) -> list[tuple[float, bytes]]:
    """The lines of an answer that may hold JSON, with the time of each."""
    place, content = urlsplit(url), json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=2**24)
    head = f"POST {place.path}/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json"
    head += "\r\nConnection: close"
    writer.write(f"{head}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    lines = [(time.perf_counter(), line) async for line in reader if b"{" in line]
    writer.close()
    return lines


def ask_all(url: str, work: Work, is_streamed: bool, more: dict[str, Any]) -> Run:
    """All clients at once; `more` are further fields of a body."""

    async def ask() -> list[list[tuple[float, bytes]]]:
        bodies = [
            {"prompt": prompt, "max_tokens": length, "temperature": 0, "stream": is_streamed} | more
            for prompt, length in zip(work.prompts, work.lengths, strict=True)
        ]
        return await asyncio.gather(*(post(url, body) for body in bodies))

    begin, cpu = time.perf_counter(), time.process_time()
    found = asyncio.run(ask())
    run = Run(time.perf_counter() - begin, client_cpu_seconds=time.process_time() - cpu)
    for lines in found:
        read_answer(run, begin, lines)
    return run


def read_answer(run: Run, begin: float, lines: list[tuple[float, bytes]]) -> None:
    """Adds one client's answer to `run`."""
    tokens: list[int] = []
    latest = begin
    for now, line in lines:
        event = json.loads(line.removeprefix(b"data: "))
        if "choices" not in event:
            raise RuntimeError(f"the server answered {event}")
        new = event["choices"][0].get("token_ids") or []
        if new and not tokens:
            run.first.append(now - latest)
        elif new:
            run.between += [(now - latest) / len(new)] * len(new)
        latest = now if new else latest
        tokens += new
        run.num_tokens += event["usage"]["completion_tokens"] if event.get("usage") and not new else len(new)
    run.answers.append(tokens)


def serve(engine: Any, tokenizer: Any, work: Work, clients: ProcessPoolExecutor, is_streamed: bool) -> Run:
    """What the clients, which are another process, say of a server."""
    more = {"model": "policy", "return_token_ids": True, "ignore_eos": True}
    with engine.serving(tokenizer, model_name="policy", max_waiting=len(work.prompts)) as server:
        clients.submit(ask_all, server.url, Work([[1]], [1]), is_streamed, more).result()  # imports, connects
        cpu = time.process_time()
        run = clients.submit(ask_all, server.url, work, is_streamed, more).result()
        run.cpu_seconds = time.process_time() - cpu
    return run


@contextlib.contextmanager
def transformers_serve(python: str, engine: Any, tokenizer: Any, threads: int | None) -> Iterator[tuple[str, str]]:
    """Address and model name of transformers' server of the same model, with continuous batching; fp32."""
    with tempfile.TemporaryDirectory() as folder:
        engine.module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        port = free_port()
        code = f"import torch; torch.set_num_threads({threads or torch.get_num_threads()}); "
        code += "from transformers.cli.transformers import main; main()"
        options = ["serve", folder, "--port", str(port), "--dtype", "float32"]
        process = subprocess.Popen([python, "-c", code, *options, "--device", str(engine.device)])
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process)
            yield f"http://127.0.0.1:{port}/v1", folder
        finally:
            process.kill()
            process.wait()


def wait_for(url: str, process: subprocess.Popen) -> None:
    """Until something answers there."""
    end = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=5)
            return
        time.sleep(0.5)
    raise RuntimeError(f"transformers serve does not answer at {url}")


def compare(args: argparse.Namespace, engine: Any, tokenizer: Any, work: Work, clients: ProcessPoolExecutor) -> dict:
    """Tokens per second of both servers for prompts as text, and their ratio."""
    ours = {"model": "policy", "ignore_eos": True}
    # Letters that the tokenizer has by themselves: a token for each.
    texts = Work(["".join("abcdfghi"[token % 8] for token in prompt) for prompt in work.prompts], work.lengths)
    rates: dict[str, list[float]] = {"this": [], "transformers": []}
    with transformers_serve(args.transformers, engine, tokenizer, args.threads) as (theirs, folder):
        clients.submit(ask_all, theirs, Work(["a"], [2]), False, {"model": folder}).result()
        for _ in range(args.repeats):
            run = clients.submit(ask_all, theirs, texts, False, {"model": folder}).result()
            rates["transformers"].append(run.num_tokens / run.seconds)
            with engine.serving(tokenizer, model_name="policy", max_waiting=len(work.prompts)) as server:
                run = clients.submit(ask_all, server.url, texts, False, ours).result()
            rates["this"].append(run.num_tokens / run.seconds)
    this, other = (statistics.median(rates[name]) for name in ("this", "transformers"))
    Console().print(f"prompts as text: {this:.0f} tokens/s, transformers serve {other:.0f}: {this / other:.1f} times")
    return dict(zip(COMPARED, (round(other, 1), round(this / other, 2)), strict=True))


def compare_with_vllm(args: argparse.Namespace, shape: Shape) -> None:
    """Prints a table of both servers, and adds a row for each to a CSV."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    longest = 2 * shape.positions + 128  # of a text whose words are two tokens each, with the template's own tokens
    ports = free_port(), free_port()
    limits = shape.prompts, longest, args.dtype
    commands = {
        "hybrid-engine serve": hybrid_engine_command(args.model, ports[0], *limits),
        "vllm": vllm_command(args.vllm, args.model, ports[1], *limits),
    }
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        servers = [
            ends.enter_context(running_server(name, command, port, torch.get_num_threads(), folder / f"{port}.log"))
            for (name, command), port in zip(commands.items(), ports, strict=True)
        ]
        runs: dict[str, list[ChatRun]] = {server.name: [] for server in servers}
        for repeat in range(args.repeats + 1):  # the first warms up
            num_chats = shape.prompts * (1 if repeat == 0 else args.chats)
            chats = build_chats(tokenizer, repeat, num_chats, shape.prompt_tokens, shape.new_tokens)
            for server in servers:
                run = run_chats(server, chats, shape.prompts)
                runs[server.name].append(run)
                print(f"{server.name}: {summarize([run])}", flush=True)
    report_beside_vllm(args, shape, runs)


def report_beside_vllm(args: argparse.Namespace, shape: Shape, runs: dict[str, list[ChatRun]]) -> None:
    """A table with ratios, and rows."""
    ours, theirs = runs.values()
    pairs = [(ours[0].answers[text], answer) for text, answer in theirs[0].answers.items()]
    num_alike = sum(answer == other for answer, other in pairs)
    if {run.num_prompt_tokens for run in ours} != {run.num_prompt_tokens for run in theirs} or num_alike < len(
        pairs
    ) / 2:
        raise RuntimeError(f"the servers were given other tokens, or {num_alike} of {len(pairs)} answers are alike")
    version = subprocess.check_output([args.vllm, "-c", "import vllm; print(vllm.__version__)"], text=True)
    common = environment(args.device) | {"vllm": version.splitlines()[-1], "model": Path(args.model).name}
    common |= {"dtype": args.dtype, "clients": shape.prompts, "chats": shape.prompts * args.chats}
    common |= {"prompt_tokens": ours[-1].num_prompt_tokens, "tokens": ours[-1].num_tokens, "alike": num_alike}
    rows = {name: summarize(found[1:]) for name, found in runs.items()}
    table = Table("server", *next(iter(rows.values())), title=f"{shape.prompts} clients, {num_alike} answers alike")
    for name, row in rows.items():
        table.add_row(name, *map(str, row.values()))
    first, second = rows.values()
    table.add_row("ratio", *(f"{first[column] / second[column]:.2f}" for column in first))
    Console().print(table)
    append_rows(args.csv, [common | {"server": name} | row for name, row in rows.items()])


def measure(ways: dict[str, Callable[[], Run]], repeats: int) -> dict[str, list[Run]]:
    """Every way once in each repeat."""
    runs: dict[str, list[Run]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, run in ways.items():
            runs[way].append(run())
    return runs


def main() -> None:
    """Prints a table and adds a row to a CSV."""
    parser = base_parser(__doc__)
    parser.add_argument("--transformers", metavar="PYTHON", help="interpreter with transformers[serving], to compare")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter with vLLM, to measure the servers of both alone")
    parser.add_argument("--model", metavar="FOLDER", help="model with a chat template, for --vllm")
    parser.add_argument("--chats", type=int, default=3, help="of each client, one after the other, for --vllm")
    args, shape = parse(parser, "serving")
    if (args.vllm is None) != (args.model is None):
        parser.error("--vllm and --model go together")
    if args.vllm:
        if args.csv == RESULTS / "serving.csv":
            args.csv = RESULTS / "serving_vllm.csv"
        compare_with_vllm(args, shape)
        return
    engine, work = build_engine(shape, args), build_work(shape)
    tokenizer = train_tokenizer(["text"], 300)
    with ProcessPoolExecutor(1, get_context("spawn")) as clients:
        ways: dict[str, Callable[[], Run]] = {
            "generate": lambda: generate(engine, work, args.device),
            "whole": lambda: serve(engine, tokenizer, work, clients, False),
            "streamed": lambda: serve(engine, tokenizer, work, clients, True),
        }
        answers = {way: run().answers for way, run in ways.items()}  # warms everything up
        if args.dtype == "float32" and not answers["generate"] == answers["whole"] == answers["streamed"]:
            raise RuntimeError("the server's tokens are not those of generate()")
        runs = measure(ways, args.repeats)
        compared = dict.fromkeys(COMPARED)
        if args.transformers:
            compared = compare(args, engine, tokenizer, work, clients)
    report(args, shape, work, runs, compared)


def report(args: argparse.Namespace, shape: Shape, work: Work, runs: dict[str, list[Run]], compared: dict) -> None:
    """A table, percentiles, and a row."""

    def median(way: str, name: str) -> float:
        return statistics.median(getattr(run, name) for run in runs[way])

    row = environment(args.device) | {"dtype": args.dtype, "clients": shape.prompts, "tokens": work.num_tokens}
    columns = ("way", "tokens/s", "of generate()", "CPU s, model and server", "of generate()", "CPU s, clients")
    table = Table(*columns, title=f"{shape.prompts} clients, {work.num_tokens} tokens")
    for way in runs:
        seconds, cpu = (median("generate", name) / median(way, name) for name in ("seconds", "cpu_seconds"))
        row[f"{way}_tokens_per_second"] = round(work.num_tokens / median(way, "seconds"), 1)
        row |= {f"{way}_of_generate": round(seconds, 3), f"{way}_cpu_of_generate": round(cpu, 3)}
        row |= {f"{way}_client_cpu_s": round(median(way, "client_cpu_seconds"), 3)}
        shown = [f"{work.num_tokens / median(way, 'seconds'):.0f}", f"{seconds:.2f}"]
        shown += [f"{median(way, 'cpu_seconds'):.2f}", f"{cpu:.2f}", f"{median(way, 'client_cpu_seconds'):.2f}"]
        table.add_row(way, *shown)
    Console().print(table)
    for name, waits in (("first_token", "first"), ("between_tokens", "between")):
        values = [value for run in runs["streamed"] for value in getattr(run, waits)]
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        row |= {f"{name}_ms_p{share}": round(cuts[share - 1] * 1000, 2) for share in (50, 95, 99)}
    Console().print(" ".join(f"{name} {value}" for name, value in row.items() if "_ms_p" in name))
    append_rows(args.csv, [row | compared])


if __name__ == "__main__":
    main()
