"""Rollouts: our `engine.generate()` against transformers' `model.generate()` and `model.generate_batch()`.

    python benchmarks/bench_rollout.py --threads 2
    python benchmarks/bench_rollout.py --threads 1 --cpu-seconds --family Qwen3.5    # "" is the Llama

One model, one process, the same prompts, the engines taking turns in every round. The cases: answers of a
fixed length (min_new_tokens = max_new_tokens) and long-tailed ones, in groups of 1 and of 8 per prompt; and
fixed lengths sampled under top_k, top_p and both, groups of 1. `--family` takes a model of families.py, of the same
cases without filters and without `model.generate_batch()`; its passes are not counted.

Long-tailed lengths are log-normal, rounded, clipped to max_new_tokens; mu is solved for the mean asked for,
mu and sigma are printed. No engine is modified: the model counts down to its end of sequence by itself (see
countdown.py), its layers doing the work of any Llama's. Groups of 1 are greedy and the prompt's last token
decides the length, so every engine writes the same tokens; so they do when sampled under filters, because the
next number has all but 1e-9 of the probability. In groups of 8 each sample draws its length as
its first token, at temperature 1 and without filters, so lengths are equal between engines in
distribution only: what is compared is tokens per second. `model.generate()` gets num_return_sequences=8.
At fixed length the countdown is longer than max_new_tokens, because `generate_batch()` ignores
min_new_tokens.

Before anything is timed every engine runs every case once; wrong tokens or lengths end the benchmark,
except `generate_batch()`'s, which become its row of the table. The shares are of the time that the counted
bytes or flops take at the ceilings measured in the same run (see roofline.py). Our engine also records the
log-probability of every token, which the others are not asked for.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator

import torch
from common import (
    DTYPES,
    Ceilings,
    Shape,
    append_rows,
    base_parser,
    environment,
    measure_ceilings,
    parse,
    peak_memory,
    timed,
)
from countdown import (
    EOS,
    build_countdown_model,
    build_prompts,
    check_countdown,
    log_normal_mu,
    log_normal_probabilities,
    start_token,
    teach_countdown,
)
from families import VOCAB, build, build_families
from rich.console import Console
from rollout_engines import Case, ContinuousBatchingRollout, HybridEngineRollout, ModuleRollout, RolloutEngine
from rollout_results import Measured, Run, ratio_to_baseline, results_rows, results_table
from roofline import rollout_passes
from transformers import GenerationConfig, PreTrainedModel

GROUP = 8
PLAIN = {"temperature": 1.0, "top_k": 0}
FILTERS = {
    "top_k=50": {"temperature": 1.0, "top_k": 50},
    "top_p=0.9": {"temperature": 1.0, "top_k": 0, "top_p": 0.9},
    "top_k=50 and top_p=0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
}
# Sampled lengths further than this from their distribution's mean, in standard errors, are a defect.
MAX_STANDARD_ERRORS = 5.0


def build_cases(shape: Shape, probabilities: torch.Tensor, device: str, filters: dict[str, dict]) -> list[Case]:
    """Fixed and long-tailed answers, in groups of 1 and of 8; fixed ones also under `filters`."""
    generator = torch.Generator().manual_seed(2)
    drawn = torch.multinomial(probabilities, shape.prompts, replacement=True, generator=generator) + 1
    fixed = torch.full((shape.prompts,), shape.new_tokens + 1)  # counts T, ..., 1, never reaching the end
    start = torch.full((shape.prompts,), start_token(shape))
    cases = []
    for name, group, last, sampling in (
        ("fixed", 1, fixed, {}),
        *((f"fixed, {name}", 1, fixed, options) for name, options in filters.items()),
        ("fixed", GROUP, fixed, PLAIN),
        ("long tail", 1, drawn, {}),
        ("long tail", GROUP, start, PLAIN),
    ):
        options = GenerationConfig(
            max_new_tokens=shape.new_tokens,
            min_new_tokens=shape.new_tokens if name.startswith("fixed") else None,
            num_return_sequences=group,
            eos_token_id=EOS,
            pad_token_id=shape.vocab - 1,
            do_sample=bool(sampling),
            **sampling,
        )
        lengths = None if last is start else last.clamp(max=shape.new_tokens).repeat_interleave(group).tolist()
        cases.append(Case(f"{name}, groups of {group}", build_prompts(shape, last).to(device), options, lengths))
    return cases


def check_answers(case: Case, answers: list[list[int]], probabilities: torch.Tensor) -> None:
    """Raises RuntimeError unless all answers count down and their lengths are the intended ones."""
    for answer in answers:
        check_countdown(answer, len(probabilities))
    lengths = [len(answer) for answer in answers]
    if case.lengths is not None:
        if lengths != case.lengths:
            raise RuntimeError(f"answers of lengths {lengths}, intended {case.lengths}")
        return
    values = torch.arange(1, len(probabilities) + 1, dtype=torch.float64)
    mean = (values * probabilities).sum().item()
    deviation = ((values - mean) ** 2 * probabilities).sum().sqrt().item()
    error = abs(statistics.mean(lengths) - mean) / (deviation / len(lengths) ** 0.5)
    if error > MAX_STANDARD_ERRORS:
        raise RuntimeError(f"mean length {statistics.mean(lengths):.1f} is {error:.1f} standard errors from {mean:.1f}")
    groups = [lengths[first : first + case.group] for first in range(0, len(lengths), case.group)]
    if all(len(set(group)) == 1 for group in groups):
        raise RuntimeError("all samples of each prompt are equal; they were not drawn independently")


def check_engine(engine: RolloutEngine, case: Case, probabilities: torch.Tensor, device: str) -> Measured:
    """Runs the case once, untimed, which also warms up."""
    measured = Measured()
    try:
        with peak_memory(device) as peak:
            result = engine.generate(case, seed=0)
        check_answers(case, engine.answers(case, result), probabilities)
        measured.peak_bytes = peak.num_bytes
    except Exception as error:
        # Whatever keeps transformers' newest way from running here belongs in the table.
        if not isinstance(engine, ContinuousBatchingRollout):
            raise
        measured.error = f"{type(error).__name__}: {error}".splitlines()[0]
    return measured


def time_engine(engine: RolloutEngine, case: Case, seed: int, model: PreTrainedModel, args: argparse.Namespace) -> Run:
    """One timed rollout."""
    clock = time.process_time if args.cpu_seconds else time.perf_counter
    seconds, result = timed(lambda: engine.generate(case, seed), args.device, clock)
    lengths = [len(answer) for answer in engine.answers(case, result)]
    num_prompts, prompt_tokens = case.prompts.shape
    passes = [] if args.family else rollout_passes(model, num_prompts, prompt_tokens, lengths)
    return Run(seconds, sum(lengths), passes)


def measure_case(
    engines: list[RolloutEngine],
    case: Case,
    model: PreTrainedModel,
    probabilities: torch.Tensor,
    args: argparse.Namespace,
) -> dict[str, Measured]:
    """Checks every engine, then times them in rounds, each round beginning with another one."""
    measured = {engine.name: check_engine(engine, case, probabilities, args.device) for engine in engines}
    able = [engine for engine in engines if measured[engine.name].error is None]
    for repeat in range(args.repeats):
        first = repeat % len(able)
        for engine in able[first:] + able[:first]:
            measured[engine.name].runs.append(time_engine(engine, case, repeat + 1, model, args))
    for engine in engines:
        engine.finish()
    return measured


def parse_arguments() -> tuple[argparse.Namespace, Shape]:
    """The command line."""
    parser = base_parser(__doc__)
    parser.add_argument(
        "--sigma", type=float, default=0.8, help="of the logarithm of long-tailed lengths (default 0.8)"
    )
    parser.add_argument("--mean-share", type=float, default=1 / 3, help="mean length over new tokens (default 1/3)")
    parser.add_argument("--max-running", type=int, default=0, help="our rows at once (default 0: the engine's choice)")
    parser.add_argument("--without-generate-batch", action="store_true", help="leave generate_batch() out")
    parser.add_argument("--cb-page-size", type=int, default=32, help="generate_batch() on the CPU: tokens per KV page")
    parser.add_argument("--cb-max-requests", type=int, default=32, help="generate_batch() on the CPU: rows at once")
    parser.add_argument("--cb-max-batch-tokens", type=int, default=256, help="generate_batch() on the CPU: per pass")
    parser.add_argument("--family", default="", help="a model of families.py, such as Qwen3.5 (default: a Llama)")
    parser.add_argument(
        "--cpu-seconds", action="store_true", help="count this process's CPU seconds: for busy machines"
    )
    parser.add_argument("--only", default="", help='run the cases whose name contains this, such as "long tail"')
    args, shape = parse(parser, "rollout")
    if args.family:
        if args.csv is not None and args.csv.name == "rollout.csv":
            args.csv = args.csv.with_name("rollout_families.csv")
        args.without_generate_batch = True
        shape = dataclasses.replace(shape, vocab=VOCAB)
    return args, shape


def build_model(shape: Shape, probabilities: torch.Tensor, args: argparse.Namespace) -> PreTrainedModel:
    """The Llama of the shape, or a model of the family with its hidden size and layers."""
    if not args.family:
        return build_countdown_model(shape, probabilities).to(args.device, DTYPES[args.dtype])
    families = build_families(shape.hidden, shape.layers, shape.positions)
    if args.family not in families:
        raise ValueError(f"--family={args.family} must be one of {', '.join(families)}")
    model = teach_countdown(build(families[args.family], torch.float32, "cpu"), shape, probabilities)
    return model.to(args.device, DTYPES[args.dtype])


def build_engines(model: PreTrainedModel, args: argparse.Namespace) -> list[RolloutEngine]:
    """The rivals first: building our engine puts its own `generate()` on the model."""
    batching = ContinuousBatchingRollout(model, args.cb_page_size, args.cb_max_requests, args.cb_max_batch_tokens)
    rivals: list[RolloutEngine] = [ModuleRollout(model.generate), *([] if args.without_generate_batch else [batching])]
    return [*rivals, HybridEngineRollout(model, args.max_running)]


def measure_cases(
    args: argparse.Namespace, shape: Shape, probabilities: torch.Tensor
) -> Iterator[tuple[str, dict[str, Measured], Ceilings]]:
    """Each case's results by engine, and the best that memory and arithmetic have reached so far."""
    dtype = DTYPES[args.dtype]
    model = build_model(shape, probabilities, args)
    engines, filters = build_engines(model, args), {} if args.family else FILTERS
    cases = [case for case in build_cases(shape, probabilities, args.device, filters) if args.only in case.name]
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters", file=sys.stderr)
    if not cases:
        raise ValueError(f'--only="{args.only}" must be part of a case\'s name, such as "long tail, groups of 8"')
    best = Ceilings(0.0, 0.0)
    for case in cases:
        reached = measure_ceilings(args.device, dtype, args.small)
        best = Ceilings(
            max(best.bytes_per_second, reached.bytes_per_second), max(best.flops_per_second, reached.flops_per_second)
        )
        measured = measure_case(engines, case, model, probabilities, args)
        able = [name for name in measured if measured[name].error is None]
        ratios = ", ".join(
            f"{name} {measured[name].tokens_per_second.p50:,.0f} tokens/s, {ratio_to_baseline(measured, name):.2f}x"
            for name in able
        )
        print(f"{case.name}: {ratios}", file=sys.stderr, flush=True)
        yield case.name, measured, best


def family_columns(args: argparse.Namespace, shape: Shape) -> dict[str, str | int]:
    """The sizes that a family's model has of the shape, whose heads and MLP are its own."""
    sizes = {name: size for name, size in vars(shape).items() if name not in ("heads", "kv_heads", "intermediate")}
    return {"family": args.family, "clock": "CPU" if args.cpu_seconds else "wall", **sizes}


def main() -> None:
    """Measures, prints, writes."""
    args, shape = parse_arguments()
    mean = args.mean_share * shape.new_tokens
    mu = log_normal_mu(shape.new_tokens, mean, args.sigma)
    probabilities = log_normal_probabilities(shape.new_tokens, mu, args.sigma)
    results = {}
    for case, measured, ceilings in measure_cases(args, shape, probabilities):
        results[case] = measured
        columns = {
            **(family_columns(args, shape) if args.family else vars(shape)),
            "dtype": args.dtype,
            "mu": round(mu, 4),
            "sigma": args.sigma,
            "repeats": args.repeats,
            "ceiling_bytes_per_second": round(ceilings.bytes_per_second),
            "ceiling_flops_per_second": round(ceilings.flops_per_second),
            **environment(args.device),
        }
        # At once, and not when all is done: what has been measured stays, whatever the next case does.
        append_rows(args.csv, results_rows({case: measured}, ceilings, columns))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(results_table(shape, args.dtype, results, ceilings))
    console.print(
        f"long tail: log-normal with mu={mu:.3f} and sigma={args.sigma:g}, clipped at {shape.new_tokens}, mean "
        f"{mean:.1f}\nceilings: {ceilings.bytes_per_second / 1e9:.1f} GB/s copied (read plus written), "
        f"{ceilings.flops_per_second / 1e9:.0f} GFLOP/s in matmul"
    )


if __name__ == "__main__":
    main()
