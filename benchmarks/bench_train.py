"""Training: our engine's step against a plain PyTorch loop, on several processes against a plain FSDP2 loop.

    python benchmarks/bench_train.py
    python benchmarks/bench_train.py --only "2 processes"
    python benchmarks/bench_train.py --offload       # on a GPU: a model whose state does not fit the card

All train the same Llama on the same tokens, with gradient accumulation, clipping and fused AdamW (train_loops.py says
what exactly): on one process in fp32 and in bf16 with fp32 masters, on several in ZeRO's stages 1, 2 and 3. Before
anything is timed a few steps of both must have the same losses and lead to the same weights.

The steps are taken in turns, in pairs whose order alternates, so that another program's load meets both. A loop that
is built first in its process is slower than one built second, on a CPU by up to 5%, also plain FSDP2 beside itself:
all is measured in both orders, and a ratio of our seconds by theirs is the geometric mean of a pair of each. Reported
is the median of these, with the 20th and 80th percentile; on several processes a step takes as long as on the slowest.
The ratio of CPU time, what all processes' threads worked, tells a busy machine from a slow loop. Peak memory is
measured in processes that do nothing but two steps of one loop.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from common import RESULTS, Quantiles, add_shape_options, append_rows, chosen_shape, environment, parse_run, run_options
from processes import run_fresh
from rich.console import Console
from rich.table import Table
from train_loops import CUDA, FULL, SMALL, Case, TrainShape
from train_measure import KINDS, Paired, measure_paired, measure_peak
from train_offload import STATE_BYTES, measure_training, shape_for_card
from train_offload import check as check_offload

GOAL = 0.03
GOAL_SECONDS = 1.0


@dataclass(frozen=True)
class Result:
    """Of one case."""

    orders: list[list[Paired]]
    """Of each process, with our loop built first and with theirs."""
    peak_bytes: dict[str, int]
    """By loop, of the process with most."""

    @property
    def first(self) -> Paired:
        """Of one process, for what is the same on all."""
        return self.orders[0][0]

    def seconds(self, kind: str) -> list[float]:
        """Of each step, on its slowest process."""
        return [s for processes in self.orders for s in _over_processes(max, [one.seconds[kind] for one in processes])]

    def cpu_seconds(self, kind: str) -> list[float]:
        """Of each step, of all processes together."""
        times = [[one.cpu_seconds[kind] for one in processes] for processes in self.orders]
        return [s for processes in times for s in _over_processes(sum, processes)]

    @property
    def ratio(self) -> Quantiles:
        """Our seconds by theirs."""
        return _ratio(self.seconds("engine"), self.seconds("plain"))

    @property
    def cpu_ratio(self) -> Quantiles:
        """Our CPU seconds by theirs."""
        return _ratio(self.cpu_seconds("engine"), self.cpu_seconds("plain"))


def _over_processes(function: Callable[[Iterable[float]], float], times: list[list[float]]) -> list[float]:
    return [function(of_step) for of_step in zip(*times, strict=True)]


def _ratio(ours: list[float], theirs: list[float]) -> Quantiles:
    """Of geometric means of two pairs, one of each half, in which the loops were built in the other order."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    half = len(ratios) // 2
    return Quantiles.of([math.sqrt(a * b) for a, b in zip(ratios[:half], ratios[half:], strict=True)])


def build_cases(num_processes: int) -> list[Case]:
    """One process in two precisions; several at every stage that shards."""
    cases = [Case(processes=1, stage=0, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    if num_processes > 1:
        cases += [Case(processes=num_processes, stage=stage, dtype=torch.float32) for stage in (1, 2, 3)]
        cases.append(Case(processes=num_processes, stage=3, dtype=torch.bfloat16))
    return cases


def measure_case(case: Case, shape: TrainShape, args: argparse.Namespace) -> Result:
    """Time, then memory, each in fresh processes."""
    place = (case.processes, args.device, args.threads)
    orders = [
        run_fresh(measure_paired, *place, case, shape, args.device, args.repeats, built)
        for built in (KINDS, KINDS[::-1])
    ]
    peaks = {kind: max(run_fresh(measure_peak, *place, kind, case, shape, args.device)) for kind in KINDS}
    return Result(orders, peaks)


def results_table(results: dict[Case, Result], shape: TrainShape) -> Table:
    """Two rows per case."""
    million = next(iter(results.values())).first.num_parameters / 1e6
    title = (
        f"a Llama of {million:.1f}M parameters; a step of each process is {shape.accumulation} micro-batches of "
        f"{shape.micro_batch} x {shape.sequence_tokens} tokens"
    )
    table = Table("case", "loop", title=title)
    for name in ("seconds p50 [p20, p80]", "to plain p50 [p20, p80]", "CPU time to plain", "peak MiB"):
        table.add_column(name, justify="right")
    for case, result in results.items():
        for kind, name in (("engine", "engine"), ("plain", "plain FSDP2" if case.processes > 1 else "plain PyTorch")):
            ratios = [_spread(result.ratio), _spread(result.cpu_ratio)] if kind == "engine" else ["1", "1"]
            seconds = _spread(Quantiles.of(result.seconds(kind)))
            table.add_row(case.name, name, seconds, *ratios, f"{result.peak_bytes[kind] / 2**20:,.0f}")
        table.add_section()
    return table


def _spread(quantiles: Quantiles) -> str:
    return f"{quantiles.p50:.3f} [{quantiles.p20:.3f}, {quantiles.p80:.3f}]"


def verdict(case: Case, result: Result) -> str:
    """The overhead, and whether it keeps to the goal where that applies and most pairs agree."""
    low, overhead, high = (ratio - 1 for ratio in asdict(result.ratio).values())
    seconds = statistics.median(result.seconds("plain"))
    line = (
        f"{case.name}: overhead {overhead:+.1%} [{low:+.1%}, {high:+.1%}], of CPU time {result.cpu_ratio.p50 - 1:+.1%}"
    )
    if seconds < GOAL_SECONDS:
        return f"{line}; a step takes {seconds:.2f} s, the goal is for {GOAL_SECONDS:g} s and more"
    outcome = "met" if high < GOAL else "missed" if low > GOAL else "undecided, the pairs disagree"
    return f"{line}; goal under {GOAL:.0%}: {outcome}"


def csv_rows(case: Case, result: Result, shape: TrainShape, device: str) -> list[dict[str, Any]]:
    """A row per loop."""
    first = result.first
    ones = Quantiles(1.0, 1.0, 1.0)
    rows = []
    for kind in KINDS:
        ratio, cpu_ratio = (result.ratio, result.cpu_ratio) if kind == "engine" else (ones, ones)
        figures = {
            "seconds": Quantiles.of(result.seconds(kind)),
            "ratio": ratio,
            "cpu_seconds": Quantiles.of(result.cpu_seconds(kind)),
            "cpu_ratio": cpu_ratio,
        }
        rows.append(
            {
                "processes": case.processes,
                "stage": case.stage,
                "dtype": str(case.dtype).removeprefix("torch."),
                "loop": kind,
                **{f"{name}_{at}": round(v, 5) for name, of in figures.items() for at, v in asdict(of).items()},
                "overhead_percent": round(100 * (ratio.p50 - 1), 2),
                "peak_bytes": result.peak_bytes[kind],
                "loss_difference": float(f"{first.loss_difference:.3g}"),
                "weight_difference": float(f"{first.weight_difference:.3g}"),
                "num_parameters": first.num_parameters,
                **vars(shape),
                "repeats": len(result.seconds(kind)),
                **environment(device),
                "threads": first.threads,
            }
        )
    return rows


def measure_offload(shape: TrainShape, args: argparse.Namespace) -> None:
    """Trains and generates with and without offload, prints, writes."""
    trainings = {
        name: run_fresh(measure_training, 1, args.device, args.threads, offloads, shape, args.device, args.repeats)[0]
        for name, offloads in (("offloaded", True), ("kept", False))
    }
    check_offload(trainings)
    num_parameters = trainings["offloaded"].num_parameters
    table = Table("parameters, gradients, state", title=f"{num_parameters / 1e6:.1f}M parameters, bf16, {shape}")
    for name in ("seconds p50", "first loss", "last loss", "peak MiB"):
        table.add_column(name, justify="right")
    rows = []
    for name, training in trainings.items():
        seconds = statistics.median(training.seconds) if training.seconds else float("nan")
        ends = [f"{training.losses[end]:.4f}" for end in (0, -1)] if training.losses else ["", ""]
        table.add_row(name, training.error or f"{seconds:.3f}", *ends, f"{training.peak_bytes / 2**20:,.0f}")
        rows.append(
            {
                "state": name,
                "num_parameters": num_parameters,
                "state_bytes": STATE_BYTES * num_parameters,
                "card_bytes": torch.cuda.get_device_properties(0).total_memory if args.device == "cuda" else "",
                "peak_bytes": training.peak_bytes,
                "seconds_p50": round(seconds, 4),
                "losses": " ".join(f"{loss:.5g}" for loss in training.losses),
                "generated_tokens": sum(map(len, training.tokens)),
                "error": training.error,
                **vars(shape),
                **environment(args.device),
            }
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    if args.device == "cpu":
        print("without a GPU all of it lies in the CPU's memory either way; the peaks are the same but for noise")
    append_rows(args.csv, rows)


def parse_arguments() -> tuple[argparse.Namespace, TrainShape]:
    """The command line."""
    parser = run_options(__doc__, repeats=5)
    full = CUDA if torch.cuda.is_available() else FULL
    add_shape_options(parser, full, SMALL)
    parser.add_argument("--offload", action="store_true", help="train and generate with offload, and without")
    parser.add_argument("--processes", type=int, help="of the sharded cases (default 2, on CUDA one per GPU)")
    parser.add_argument("--only", default="", help='run the cases whose name contains this, such as "stage 3"')
    args = parse_run(parser, "train")
    if args.offload and args.csv == RESULTS / "train.csv":
        args.csv = RESULTS / "offload.csv"
    if args.offload and args.device == "cuda":
        full = shape_for_card(args.device)
    num_gpus = torch.cuda.device_count()
    if args.processes is None:
        args.processes = num_gpus if args.device == "cuda" else 2
    if args.device == "cuda" and args.processes > num_gpus:
        raise ValueError(f"--processes={args.processes} needs a GPU each, there are {num_gpus}; add --device cpu")
    return args, chosen_shape(args, full, SMALL)


def main() -> None:
    """Measures, prints, writes."""
    args, shape = parse_arguments()
    if args.offload:
        measure_offload(shape, args)
        return
    cases = [case for case in build_cases(args.processes) if args.only in case.name]
    if not cases:
        raise ValueError(f'--only="{args.only}" must be part of a case\'s name, such as "stage 3, float32"')
    results, rows = {}, []
    for case in cases:
        results[case] = measure_case(case, shape, args)
        rows += csv_rows(case, results[case], shape, args.device)
        print(verdict(case, results[case]), file=sys.stderr, flush=True)
    Console(width=None if sys.stdout.isatty() else 160).print(results_table(results, shape))
    for case, result in results.items():
        print(verdict(case, result))
    if args.processes == 1:
        print("no sharded cases: they need a process per GPU and there is one; --device cpu runs them on gloo")
    append_rows(args.csv, rows)


if __name__ == "__main__":
    main()
