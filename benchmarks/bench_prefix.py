"""What the cache of prefixes saves: episodes that begin with the same system prompt, with and without it.

    python benchmarks/bench_prefix.py --threads 1
    python benchmarks/bench_prefix.py --episodes 64 --common-tokens 2000 --threads 1

All episodes ask at once, each for the answer to a prompt of `common_tokens` equal tokens and `own_tokens` of its own,
and read the answer as a stream, from a process of their own. Both sides serve the same weights, in turn in each repeat,
each repeat by a server that has seen no prompt. Before anything is timed, the answers of both are compared.
"""

import dataclasses
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from bench_serving import Run, Work, serve
from common import (
    LlamaShape,
    add_shape_options,
    append_rows,
    chosen_shape,
    environment,
    llama_config,
    parse_run,
    run_options,
)
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM

import hybrid_engine
from hybrid_engine.rlhf.tasks.corpus import train_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeShape(LlamaShape):
    """A Llama, and the first requests of episodes."""

    episodes: int
    common_tokens: int
    own_tokens: int
    new_tokens: int

    @property
    def positions(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.common_tokens + self.own_tokens + self.new_tokens


# 5M parameters.
FULL = EpisodeShape(hidden=256, layers=4, heads=4, kv_heads=2, intermediate=768, vocab=4096, episodes=64,
                    common_tokens=2000, own_tokens=50, new_tokens=64)  # fmt: skip
SMALL = EpisodeShape(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128, vocab=512, episodes=8,
                     common_tokens=200, own_tokens=10, new_tokens=8)  # fmt: skip


def build_engine(shape: EpisodeShape, device: str, is_cached: bool) -> Any:
    """Equal weights each time."""
    torch.manual_seed(0)
    config = llama_config(shape, shape.positions, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    options = {"enabled": True, "max_out_tokens": shape.positions, "print_latency": False, "prefix_cache": is_cached}
    engine, *_ = hybrid_engine.initialize(
        model=LlamaForCausalLM(config).to(device),
        config={"train_batch_size": 1, "hybrid_engine": options | {"max_running": shape.episodes}},
    )
    return engine.eval()


def build_work(shape: EpisodeShape) -> Work:
    """One prompt for each episode."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, shape.vocab) for _ in range(count)]

    common = tokens(shape.common_tokens)
    return Work([common + tokens(shape.own_tokens) for _ in range(shape.episodes)], [shape.new_tokens] * shape.episodes)


def main() -> None:
    """Prints a table and adds a row to a CSV."""
    parser = run_options(__doc__, repeats=3)
    add_shape_options(parser, FULL, SMALL)
    args = parse_run(parser, "prefix")
    shape = chosen_shape(args, FULL, SMALL)
    work, tokenizer = build_work(shape), train_tokenizer(["text"], 300)
    engines = {is_cached: build_engine(shape, args.device, is_cached) for is_cached in (False, True)}
    runs: dict[bool, list[Run]] = {False: [], True: []}
    with ProcessPoolExecutor(1, get_context("spawn")) as clients:
        for _ in range(args.repeats + 1):  # the first warms up
            for is_cached, engine in engines.items():
                runs[is_cached].append(serve(engine, tokenizer, work, clients, True))
    if runs[False][0].answers != runs[True][0].answers:
        raise RuntimeError("the cache changed an answer")
    table = Table("prefixes", "first token (s)", "tokens/s", "CPU seconds", title=f"{shape.episodes} episodes")
    first, rate, cpu = {}, {}, {}
    for is_cached, found in runs.items():
        timed = found[1:]
        first[is_cached] = statistics.median(seconds for run in timed for seconds in run.first)
        rate[is_cached] = statistics.median(run.num_tokens / run.seconds for run in timed)
        cpu[is_cached] = statistics.median(run.cpu_seconds for run in timed)
        numbers = f"{first[is_cached]:.3f}", f"{rate[is_cached]:.1f}", f"{cpu[is_cached]:.2f}"
        table.add_row("cached" if is_cached else "computed by each", *numbers)
    ratios = {"first_token_ratio": first[True] / first[False], "rate_ratio": rate[True] / rate[False]}
    table.add_row("ratio", *(f"{ratio:.3f}" for ratio in ratios.values()), f"{cpu[True] / cpu[False]:.3f}")
    Console().print(table)
    row = dataclasses.asdict(shape) | {name: round(ratio, 4) for name, ratio in ratios.items()}
    row |= {"first_token_seconds": round(first[True], 4), "tokens_per_second": round(rate[True], 1)}
    append_rows(args.csv, [row | {"cpu_ratio": round(cpu[True] / cpu[False], 4)} | environment(args.device)])


if __name__ == "__main__":
    main()
