"""What the cache of prefixes saves: episodes that begin with the same system prompt, with and without it.

    python benchmarks/bench_prefix.py --threads 1
    python benchmarks/bench_prefix.py --episodes 64 --common-tokens 2000 --threads 1

All episodes ask at once, each for the answer to a prompt of `common_tokens` equal tokens and `own_tokens` of its own,
in the live batch that servers run. Both sides have the same weights and run in turn in each repeat, each repeat in a
batch that has seen no prompt. Every answer is compared with the other side's. Seconds are told by the clock and of CPU,
which other programs on the machine do not change.
"""

import dataclasses
import random
import statistics
import time
from typing import Any

import torch
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
from hybrid_engine.generation.core import Prompt, Sequence
from hybrid_engine.generation.live.opening import live_batch
from hybrid_engine.generation.options import GenerationOptions


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


def build_prompts(shape: EpisodeShape) -> list[list[int]]:
    """One prompt for each episode."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, shape.vocab) for _ in range(count)]

    common = tokens(shape.common_tokens)
    return [common + tokens(shape.own_tokens) for _ in range(shape.episodes)]


@dataclasses.dataclass
class EpisodesRun:
    """What one side took; seconds by the clock and of CPU."""

    seconds: tuple[float, float]
    first: list[tuple[float, float]]
    """Until the first token of each answer."""
    answers: dict[int, list[int]]


def run(engine: Any, shape: EpisodeShape, prompts: list[list[int]]) -> EpisodesRun:
    """All answers to `prompts`, which ask at once."""
    options = GenerationOptions(max_new_tokens=shape.new_tokens)
    answers: dict[int, list[int]] = {}
    first: dict[int, tuple[float, float]] = {}
    with live_batch(engine.generator, shape.positions, shape.episodes) as batch:
        begin = time.perf_counter(), time.process_time()

        def since() -> tuple[float, float]:
            return time.perf_counter() - begin[0], time.process_time() - begin[1]

        batch.add([Sequence(Prompt(tokens), row, options) for row, tokens in enumerate(prompts)])
        while batch.has_work:
            for progress in batch.turn():
                first.setdefault(progress.sequence.row, since())
                answers.setdefault(progress.sequence.row, []).extend(progress.tokens)
        return EpisodesRun(since(), list(first.values()), answers)


def main() -> None:
    """Prints a table and adds a row to a CSV."""
    parser = run_options(__doc__, repeats=3)
    add_shape_options(parser, FULL, SMALL)
    args = parse_run(parser, "prefix")
    shape = chosen_shape(args, FULL, SMALL)
    prompts = build_prompts(shape)
    engines = {is_cached: build_engine(shape, args.device, is_cached) for is_cached in (False, True)}
    few = dataclasses.replace(shape, episodes=2, new_tokens=2)
    runs: dict[bool, list[EpisodesRun]] = {False: [], True: []}
    for engine in engines.values():
        run(engine, few, prompts[:2])  # warms up
    for _ in range(args.repeats):
        for is_cached, engine in engines.items():
            runs[is_cached].append(run(engine, shape, prompts))
            if runs[is_cached][-1].answers != runs[False][0].answers:
                raise RuntimeError("the cache changed an answer")
    report(args, shape, runs)


def report(args: Any, shape: EpisodeShape, runs: dict[bool, list[EpisodesRun]]) -> None:
    """The table, and the row of the CSV."""
    title = f"{shape.episodes} episodes, {shape.common_tokens} common tokens"
    table = Table("", "prefix computed by each", "cached", "cached / computed", title=title)
    row: dict[str, Any] = dataclasses.asdict(shape)
    for place, clock in enumerate(("seconds", "cpu_seconds")):
        for name in ("first_token", "all_answers"):
            medians = [
                statistics.median(
                    value[place]
                    for found in side
                    for value in (found.first if name == "first_token" else [found.seconds])
                )
                for side in (runs[False], runs[True])
            ]
            ratio = medians[1] / medians[0]
            table.add_row(f"{name}, {clock}", *(f"{median:.3f}" for median in medians), f"{ratio:.3f}")
            row |= {f"{name}_{clock}": round(medians[1], 4), f"{name}_{clock}_ratio": round(ratio, 4)}
    Console().print(table)
    append_rows(args.csv, [row | environment(args.device)])


if __name__ == "__main__":
    main()
