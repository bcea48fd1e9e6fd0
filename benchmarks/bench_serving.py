"""The server against `engine.generate()` on the same prompts, and how long its clients wait for tokens.

    python benchmarks/bench_serving.py --threads 2
    python benchmarks/bench_serving.py --prompts 64 --new-tokens 128

As many clients as prompts, each with one request: prompts of mixed lengths, answers of mixed lengths without an end. In
each repeat every way runs once, in turn: all prompts in one `generate()` with a length for each row, then through the
server whole, then streamed. Before anything is timed the server's tokens are compared with those of `generate()`.
Needs the extra `agents`. The clients are a process of their own on the same machine, which is part of what is measured.
"""

import argparse
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import openai
import torch
from common import DTYPES, Shape, append_rows, base_parser, environment, llama_config, parse, timed
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM

import hybrid_engine
from hybrid_engine.recipes.tasks.small_llama import train_tokenizer

WAYS = ("generate", "whole", "streamed")


@dataclass(frozen=True)
class Work:
    """What every way answers."""

    prompts: list[list[int]]
    lengths: list[int]
    """Tokens of each answer."""

    @property
    def num_tokens(self) -> int:
        """Of all answers."""
        return sum(self.lengths)


@dataclass
class Waits:
    """Seconds that streaming clients waited."""

    first: list[float] = field(default_factory=list)
    """From the request to its first token."""
    between: list[float] = field(default_factory=list)
    """From a token to the next."""


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


def generate(engine: Any, work: Work, device: str) -> list[list[int]]:
    """Each answer's tokens by one call."""
    width = max(map(len, work.prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in work.prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in work.prompts], device=device)
    rows = [{"max_new_tokens": length} for length in work.lengths]
    output = engine.generate(ids, attention_mask=mask, do_sample=False, row_options=rows, max_new_tokens=1)
    answers = output[:, width:].tolist()
    return [answer[:length] for answer, length in zip(answers, work.lengths, strict=True)]


def ask(client: Any, work: Work, row: int, waits: Waits | None) -> list[int]:
    """One client's answer; streamed where `waits` are wanted."""
    begin = time.perf_counter()
    answer = client.completions.create(
        model="policy",
        prompt=work.prompts[row],
        max_tokens=work.lengths[row],
        temperature=0,
        stream=waits is not None,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    if waits is None:
        return answer.choices[0].token_ids
    tokens, latest = [], None
    for event in answer:
        now = time.perf_counter()
        new = event.choices[0].token_ids
        if new:
            (waits.first if latest is None else waits.between).append(now - (begin if latest is None else latest))
            latest = now
        tokens += new
    return tokens


def ask_all(url: str, work: Work, is_streamed: bool) -> tuple[float, list[list[int]], Waits]:
    """All clients at once: seconds from the first request to the last answer, the answers, and the waits."""
    waits, rows = Waits(), range(len(work.prompts))
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client, ThreadPoolExecutor(len(rows)) as pool:
        client.models.list()  # connects
        seconds, answers = timed(
            lambda: list(pool.map(lambda row: ask(client, work, row, waits if is_streamed else None), rows)), "cpu"
        )
    return seconds, answers, waits


def serve(
    engine: Any, tokenizer: Any, work: Work, clients: ProcessPoolExecutor, is_streamed: bool
) -> tuple[float, list[list[int]], Waits]:
    """What the clients, which are another process, say of a server."""
    with engine.serving(tokenizer, model_name="policy", max_waiting=len(work.prompts)) as server:
        return clients.submit(ask_all, server.url, work, is_streamed).result()


def main() -> None:
    """Prints a table and adds a row to a CSV."""
    parser = base_parser(__doc__)
    args, shape = parse(parser, "serving")
    engine, work = build_engine(shape, args), build_work(shape)
    tokenizer = train_tokenizer(["text"], 300)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    waits = Waits()
    with ProcessPoolExecutor(1, get_context("spawn")) as clients:
        answers = serve(engine, tokenizer, work, clients, False)[1]
        if args.dtype == "float32" and answers != generate(engine, work, args.device):
            raise RuntimeError("the server's tokens are not those of generate()")
        for _ in range(args.repeats):
            seconds["generate"].append(timed(lambda: generate(engine, work, args.device), args.device)[0])
            seconds["whole"].append(serve(engine, tokenizer, work, clients, False)[0])
            streamed, _, waited = serve(engine, tokenizer, work, clients, True)
            seconds["streamed"].append(streamed)
            waits.first += waited.first
            waits.between += waited.between
    rates = {way: work.num_tokens / statistics.median(found) for way, found in seconds.items()}
    table = Table("way", "tokens/s", "of generate()", title=f"{shape.prompts} clients, {work.num_tokens} tokens")
    for way in WAYS:
        table.add_row(way, f"{rates[way]:.0f}", f"{rates[way] / rates['generate']:.2f}")
    Console().print(table)
    percentiles = {
        f"{name}_p{share}": statistics.quantiles(values, n=100, method="inclusive")[share - 1] * 1000
        for name, values in (("first_token_ms", waits.first), ("between_tokens_ms", waits.between))
        for share in (50, 95, 99)
    }
    Console().print(" ".join(f"{name} {value:.1f}" for name, value in percentiles.items()))
    row = environment(args.device) | {"dtype": args.dtype, "clients": shape.prompts, "tokens": work.num_tokens}
    row |= {f"{way}_tokens_per_second": round(rates[way], 1) for way in WAYS}
    row |= {f"{way}_of_generate": round(rates[way] / rates["generate"], 3) for way in WAYS[1:]}
    append_rows(args.csv, [row | {name: round(value, 2) for name, value in percentiles.items()}])


if __name__ == "__main__":
    main()
