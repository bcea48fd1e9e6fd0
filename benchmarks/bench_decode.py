"""The decode step: milliseconds, tokens per second, achieved bytes per second and the share of the roofline.

    python benchmarks/bench_decode.py --goals                              # on an H100: the goals, met or missed
    python benchmarks/bench_decode.py --shapes qwen-0.5b --batch 1 32 --context 256 --rivals
    python benchmarks/bench_decode.py --threads 2                          # on a CPU: small shapes

Greedy rollouts of a fixed length through `engine.generate()`, after one that warms up and records graphs. A step's
time is the engine's own `decode_seconds` over the steps; its bytes are the weights of the layers and the LM head,
read once, and keys and values of the context, read once per row (the embedding's rows and activations are left
out). The roofline is the larger of those bytes over the bandwidth and of the operations over the rate that a
copy and a matrix product reach in the same run. Before anything is timed the log-probabilities of the first
rollout are compared with the model's own forward on the same tokens; in fp32 the tokens with its `generate()` too.

`--rivals` adds transformers' `generate()` in eager mode and with a static cache and `torch.compile`, for the same
prompts and new tokens, prefill included on both sides; `--profile` prints where one step's time goes.
"""

import argparse
import gc
import statistics
import sys
from functools import partial

import torch
from common import (
    DTYPES,
    Ceilings,
    append_rows,
    environment,
    measure_ceilings,
    parse_run,
    run_options,
    synchronize,
    timed,
)
from decode_shapes import GOALS, SHAPES, Goal
from rich.console import Console
from rich.table import Table
from roofline import rollout_passes
from transformers import PreTrainedModel

import hybrid_engine
from hybrid_engine.ops import token_logprobs

# Mean difference of log-probabilities from the module's forward that rounding explains.
ROUNDING = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}


def parse_arguments() -> argparse.Namespace:
    """The command line; on a CPU small shapes and fp32 are the defaults."""
    parser = run_options(__doc__)
    is_cuda = torch.cuda.is_available()
    parser.add_argument("--goals", action="store_true", help="the shapes, batches and contexts that have goals")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen-0.5b"] if is_cuda else ["llama-16m"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", nargs="+", type=int, default=[256] if is_cuda else [64], help="prompt tokens")
    parser.add_argument("--new-tokens", type=int, default=128 if is_cuda else 32)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if is_cuda else "float32")
    parser.add_argument("--rivals", action="store_true", help="also transformers' generate(), eager and compiled")
    parser.add_argument("--profile", action="store_true", help="prints the kernels of the last steps")
    args = parse_run(parser, "decode")
    if args.small:
        args.shapes, args.batch, args.context, args.new_tokens = ["opt-3m"], [1, 3], [16], 8
    return args


def cases(args: argparse.Namespace) -> list[Goal]:
    """What is measured, in an order that builds each model once."""
    if args.goals:
        return GOALS
    return [
        Goal(shape, batch, context, args.new_tokens)
        for shape in args.shapes
        for context in args.context
        for batch in args.batch
    ]


def build_engine(model: PreTrainedModel, dtype: str, max_tokens: int):
    """An engine that only evaluates, so that memory holds the weights and the KV workspace."""
    engine, *_ = hybrid_engine.initialize(
        model=model,
        config={
            "train_batch_size": 1,
            "bf16": {"enabled": dtype == "bfloat16"},
            "fp16": {"enabled": dtype == "float16"},
            "hybrid_engine": {"enabled": True, "max_out_tokens": max_tokens, "max_running": 256},
        },
    )
    if engine.generator.fallback_reason is not None:
        raise RuntimeError(f"no containers: {engine.generator.fallback_reason}")
    return engine.eval()


def check(model: PreTrainedModel, output, case: Goal, args: argparse.Namespace, own_generate) -> float:
    """Raises RuntimeError where the rollout is not the model's; returns the mean difference of log-probabilities."""
    rows = output.sequences[:2]  # of a large batch two rows say enough and fit the memory
    with torch.no_grad():
        logits = model(rows).logits[:, case.prompt_tokens - 1 : -1]
    own = token_logprobs(logits, rows[:, case.prompt_tokens :])
    difference = (own - output.logprobs[:2]).abs().mean().item()
    if not difference <= ROUNDING[args.dtype]:
        raise RuntimeError(f"{case}: log-probabilities are {difference:.3g} from the model's own on average")
    if args.dtype == "float32":
        prompts = rows[:, : case.prompt_tokens]
        expected = own_generate(prompts, **options(case, prompts))
        if not torch.equal(expected, rows):
            raise RuntimeError(f"{case}: greedy tokens are not the model's own")
    return difference


def options(case: Goal, prompts: torch.Tensor) -> dict:
    """Greedy, a fixed number of tokens."""
    return {
        "attention_mask": torch.ones_like(prompts), "max_new_tokens": case.new_tokens, "do_sample": False,
        "min_new_tokens": case.new_tokens, "pad_token_id": 0,
    }  # fmt: skip


def measure_rivals(own_generate, prompts: torch.Tensor, case: Goal, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of whole rollouts by transformers, by mode; NaN for a mode that fails here."""
    seconds = {}
    for mode, extra in (("eager", {}), ("compiled", {"cache_implementation": "static"})):
        try:
            run = partial(own_generate, prompts, **options(case, prompts), **extra)
            for _ in range(1 if mode == "eager" else 2):  # compiling takes the first ones
                run()
            seconds[mode] = timed(run, args.device)[0]
        except Exception as error:  # whatever keeps a rival from running belongs in the table
            print(f"transformers, {mode}: {type(error).__name__}: {str(error).splitlines()[0]}")
            seconds[mode] = float("nan")
    return seconds


def measure(model: PreTrainedModel, engine, own_generate, case: Goal, ceilings: Ceilings, args) -> dict:
    """One row: correctness first, then timed rollouts, then the rivals."""
    generator = torch.Generator().manual_seed(case.batch)
    shape = (case.batch, case.prompt_tokens)
    prompts = torch.randint(3, model.config.vocab_size, shape, generator=generator).to(args.device)

    def rollout():
        engine.latency.begin()
        return engine.generate(prompts, return_dict_in_generate=True, **options(case, prompts))

    difference = check(model, rollout(), case, args, own_generate)
    captures = engine.latency_stats()["graph_capture_seconds"]
    steps, totals = [], []
    for _ in range(args.repeats):
        totals.append(timed(rollout, args.device)[0])
        stats = engine.latency_stats()
        steps.append((stats["decode_seconds"] - stats["graph_capture_seconds"]) / (case.new_tokens - 1))
    step = statistics.median(steps)
    passes = rollout_passes(model, case.batch, case.prompt_tokens, [case.new_tokens] * case.batch)[1:]
    num_bytes = statistics.mean(one.num_bytes for one in passes)
    roof = statistics.mean(one.seconds(ceilings) for one in passes)
    row = {
        "shape": case.shape, "batch": case.batch, "context": case.prompt_tokens, "new_tokens": case.new_tokens,
        "dtype": args.dtype, "ms_per_step": round(step * 1e3, 4), "tokens_per_second": round(case.batch / step, 1),
        "gbytes_per_second": round(num_bytes / step / 1e9, 1),
        "share_of_bandwidth": round(num_bytes / step / ceilings.bytes_per_second, 4),
        "share_of_roofline": round(roof / step, 4), "capture_seconds": round(captures, 3),
        "rollout_tokens_per_second": round(case.batch * case.new_tokens / statistics.median(totals), 1),
        "logprob_difference": float(f"{difference:.3g}"),
    }  # fmt: skip
    wants_rivals = args.rivals or case.eager or case.compiled
    rivals = measure_rivals(own_generate, prompts, case, args) if wants_rivals else {}
    for mode in ("eager", "compiled"):
        row[f"times_{mode}"] = round(rivals[mode] / statistics.median(totals), 2) if mode in rivals else ""
    if args.profile:
        print_profile(rollout, args.device)
    return row


def print_profile(rollout, device: str) -> None:
    """Kernels by time over one rollout."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.device(device).type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        rollout()
        synchronize(device)
    key = "self_cuda_time_total" if len(activities) > 1 else "self_cpu_time_total"
    print(profile.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60))


def verdict(goal: Goal, row: dict) -> str:
    """Each of a case's goals, met or missed."""
    judged = []
    if goal.share is not None:
        judged.append((row["share_of_bandwidth"], goal.share, "of the bandwidth"))
    if goal.deepspeed_tokens is not None:
        ratio = row["rollout_tokens_per_second"] / goal.deepspeed_tokens
        judged.append((round(ratio, 2), goal.times, "times DeepSpeed"))
    for mode in ("eager", "compiled"):
        if getattr(goal, mode) is not None and row[f"times_{mode}"] != "":
            judged.append((row[f"times_{mode}"], getattr(goal, mode), f"times transformers, {mode}"))
    return "; ".join(
        f"{value} {what}, goal {wanted}: {'met' if value >= wanted else 'missed'}" for value, wanted, what in judged
    )


def is_of(case: Goal, row: dict) -> bool:
    """Whether a row was measured for a case."""
    return (row["shape"], row["batch"], row["context"]) == (case.shape, case.batch, case.prompt_tokens)


def main() -> int:
    """Measures, prints, writes; 1 when a case could not be measured."""
    args = parse_arguments()
    ceilings = measure_ceilings(args.device, DTYPES[args.dtype], args.small)
    print(f"ceilings: {ceilings.bytes_per_second / 1e9:.1f} GB/s, {ceilings.flops_per_second / 1e12:.2f} TFLOP/s")
    todo, rows, failed = cases(args), [], []
    for name in dict.fromkeys(case.shape for case in todo):
        ours = [case for case in todo if case.shape == name]
        longest = max(case.prompt_tokens + case.new_tokens for case in ours)
        model = SHAPES[name].build(longest, DTYPES[args.dtype], args.device)
        own_generate = model.generate
        engine = build_engine(model, args.dtype, longest)
        for case in ours:
            try:
                rows.append(measure(model, engine, own_generate, case, ceilings, args))
            except Exception as error:  # the next case may well run
                failed.append(f"{case.shape} at batch {case.batch}")
                print(f"{failed[-1]} FAILED: {type(error).__name__}: {error}", flush=True)
                continue
            print(rows[-1], verdict(case, rows[-1]), flush=True)
            # At once, and not when all is done: what has been measured stays, whatever the next case does.
            append_rows(args.csv, [rows[-1] | environment(args.device)])
        del model, own_generate, engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if rows:
        table = Table(*(column.replace("_", " ") for column in rows[0]))
        for row in rows:
            table.add_row(*map(str, row.values()))
        Console(width=200).print(table)
    judged = [(case, row) for case in todo for row in rows if is_of(case, row)]
    for case, row in judged:
        if told := verdict(case, row):
            print(f"{case.shape} at batch {case.batch}: {told}")
    print(f"{len(rows)} cases measured" + (f"; FAILED: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
