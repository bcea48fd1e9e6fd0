"""The host's time for a decode turn: scheduling, tables, tokens read back. The device's part is played by nobody.

    python benchmarks/bench_host.py

A GPU that decodes 256 rows in some milliseconds waits for whatever the host takes beyond that, so this is
measured alone: the scheduler, the slots' tables and the reading of tokens are the engine's, and a stand-in for the
recorded step advances the positions and says which rows have drawn their last token. Its own time is taken off.
Answers are log-normal as in bench_rollout.py; turns that prefill are not counted. Times are of this thread's CPU,
not of the clock on the wall.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from common import append_rows, environment, parse_run, run_options
from countdown import log_normal_mu
from rich.console import Console
from rich.table import Table

from hybrid_engine.containers.cache import CacheShape, ModelCache
from hybrid_engine.generation.decode import DecodeStep, SlotTables
from hybrid_engine.generation.memory import build_sequences
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.generation.recorders import StepGraphs
from hybrid_engine.generation.scheduler import MAX_PREFILL_TOKENS, Scheduler
from hybrid_engine.generation.step import ContinuousBatch
from hybrid_engine.ops import Batch, SampleOp

BLOCK_SIZE = 64
VOCABULARY = 8


class NoModel:
    """Gives every row the same logits."""

    can_be_recorded = True
    recompute_length = None
    vocab_size = VOCABULARY

    def forward(self, batch: Batch, cache: ModelCache, layers: object) -> torch.Tensor:
        """`[R, V]`: of sequences or rows, whichever the batch has."""
        rows = batch.tokens if batch.wanted is None else batch.wanted
        return torch.zeros(len(rows), VOCABULARY)


class StandIn:
    """Stands for CudaGraphs: a replay advances the rows and ends those that have drawn as many tokens as their key."""

    def __init__(self) -> None:
        self.step: DecodeStep | None = None
        self.seconds = 0.0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """The stand-in's replay."""
        return self._replay

    def _replay(self) -> None:
        start = time.thread_time()
        assert self.step is not None
        _, draws, keys, is_live, _ = self.step.tables.numbers
        rows = self.step.tables.rows
        self.step._results[2] = (draws + 1 >= keys)[rows]
        self.step.tables.numbers[:2] += is_live
        self.seconds += time.thread_time() - start


def measure(num_slots: int, num_prompts: int, prompt_tokens: int, new_tokens: int, lag: int) -> list[float]:
    """Seconds of the host for each decode turn of a rollout that decodes `num_slots` rows or nearly as many."""
    options = GenerationOptions(max_new_tokens=new_tokens, eos_token_ids=(1,))
    sequences = build_sequences([[2] * prompt_tokens] * num_prompts, [options] * num_prompts, 1)
    rng, mu = random.Random(0), log_normal_mu(new_tokens, new_tokens / 4, 0.8)
    for sequence in sequences:
        sequence.key = min(new_tokens, max(2, round(rng.lognormvariate(mu, 0.8))))
    num_columns = -(-(prompt_tokens + new_tokens - 1) // BLOCK_SIZE)
    scheduler = Scheduler(
        sequences,
        max_running=num_slots,
        num_blocks=num_slots * num_columns,
        block_size=BLOCK_SIZE,
        max_prefill_tokens=MAX_PREFILL_TOKENS,
    )
    stand_in = StandIn()
    tables = SlotTables(num_slots, num_columns, num_slots * num_columns, 9, torch.device("cpu"))
    cache = ModelCache.zeros(
        CacheShape((), num_slots * num_columns + 1, BLOCK_SIZE), torch.float32, torch.device("cpu")
    )
    step = DecodeStep(NoModel(), SampleOp(options.sampling), tables, cache, StepGraphs(stand_in))  # type: ignore[arg-type]
    stand_in.step = step
    strategy = ContinuousBatch(NoModel(), scheduler, step, lambda: (), lag)  # type: ignore[arg-type]
    seconds: list[float] = []
    while scheduler.waiting or not seconds:
        prefills, stand_in.seconds = strategy.prefill_time.seconds(), 0.0
        start = time.thread_time()
        strategy.step()
        taken = time.thread_time() - start - stand_in.seconds
        if strategy.prefill_time.seconds() == prefills and len(scheduler.running) > 0.9 * num_slots:
            seconds.append(taken)
    return seconds


def main() -> None:
    """Measures, prints, writes."""
    parser = run_options(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    args: argparse.Namespace = parse_run(parser, "host")
    new_tokens = 64 if args.small else 1024
    table = Table("rows", "lag", "turns", "p20 ms", "median ms", "p80 ms", title="host time of a decode turn")
    rows = []
    for num_slots in args.rows:
        for lag in (0, 1):
            runs = [measure(num_slots, 3 * num_slots, 256, new_tokens, lag) for _ in range(args.repeats)]
            p20, p50, p80 = (1e3 * statistics.median(quantile(run, q) for run in runs) for q in (0.2, 0.5, 0.8))
            table.add_row(str(num_slots), str(lag), str(len(runs[0])), f"{p20:.3f}", f"{p50:.3f}", f"{p80:.3f}")
            row = {"rows": num_slots, "lag": lag, "turns": len(runs[0]), "p20_ms": p20, "p50_ms": p50, "p80_ms": p80}
            rows.append({**row, "repeats": args.repeats, **environment("cpu")})
    Console().print(table)
    if args.csv is not None:
        append_rows(args.csv, rows)


def quantile(values: list[float], share: float) -> float:
    """The value that `share` of them are below."""
    return sorted(values)[int(share * (len(values) - 1))]


if __name__ == "__main__":
    main()
