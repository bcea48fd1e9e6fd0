"""Where the time of one decode step goes: the device's kernels by time, and the time in which the device had none.

    python benchmarks/profile_decode.py                     # on a GPU: a Llama 8B, bf16, batches 1, 32 and 256
    python benchmarks/profile_decode.py --shape qwen-0.5b --batch 1 64
    python benchmarks/profile_decode.py --small

A greedy rollout is measured twice after one that warms up: once by the clock alone, once under PyTorch's profiler. All
figures are per decode step, prefill and all, of `--new-tokens` steps: prefill is one of them. `idle` is the clock's
time less the kernels' on one stream: what the device waited for the host. On a CPU operators stand in place of kernels,
and the profiler slows them.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from bench_decode import build_engine
from common import DTYPES, append_rows, environment, parse_run, run_options, synchronize, timed
from decode_shapes import SHAPES
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

SHOWN_KERNELS = 18


@dataclass(frozen=True)
class Kernel:
    """One kernel, or on a CPU one operator, over a rollout."""

    name: str
    calls: int
    microseconds: float


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = run_options(__doc__, repeats=1)
    is_cuda = torch.cuda.is_available()
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b" if is_cuda else "llama-16m")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32, 256] if is_cuda else [1, 8])
    parser.add_argument("--context", type=int, default=256 if is_cuda else 64, help="prompt tokens")
    parser.add_argument("--new-tokens", type=int, default=64 if is_cuda else 16)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if is_cuda else "float32")
    args = parse_run(parser, "profile")
    if args.small:
        args.shape, args.batch, args.context, args.new_tokens = "opt-3m", [1, 3], 16, 8
    return args


def read_kernels(run: Callable[[], Any], device: str) -> list[Kernel]:
    """What ran on the device during `run`, most time first."""
    is_cuda = torch.device(device).type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as profiled:
        run()
        synchronize(device)
    kernels = []
    for entry in profiled.key_averages():
        if is_cuda and entry.device_type == DeviceType.CUDA and not entry.is_user_annotation:
            kernels.append(Kernel(entry.key, entry.count, entry.self_device_time_total))
        if not is_cuda:
            kernels.append(Kernel(entry.key, entry.count, entry.self_cpu_time_total))
    return sorted(kernels, key=lambda kernel: -kernel.microseconds)


def measure(engine: Any, batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints the table of one batch; returns its rows."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(3, engine.module.config.vocab_size, (batch, args.context), generator=generator)
    prompts = prompts.to(engine.device)
    mask, steps = torch.ones_like(prompts), args.new_tokens

    def rollout() -> None:
        engine.generate(prompts, mask, do_sample=False, max_new_tokens=steps, min_new_tokens=steps, pad_token_id=0)

    rollout()
    seconds = timed(rollout, args.device)[0]
    engine.latency.begin()
    rollout()
    stats = engine.latency_stats()
    kernels = read_kernels(rollout, args.device)
    busy = sum(kernel.microseconds for kernel in kernels)
    wall = seconds * 1e6
    summary = {"kernel": "(all)", "calls": sum(kernel.calls for kernel in kernels), "microseconds": busy}
    idle = {"kernel": "(idle)", "calls": 0, "microseconds": max(0.0, wall - busy)}
    print(f"\n{args.shape}, batch {batch}, {args.context} + {steps} tokens, {args.dtype}")
    print(f"{wall / steps:.1f} us a step by the clock, {busy / steps:.1f} us in {summary['calls'] / steps:.1f} kernels")
    prefill_ms, decode_us = stats["prefill_seconds"] * 1e3, stats["decode_seconds"] / (steps - 1) * 1e6
    captures = stats["graph_captures"]
    print(
        f"the engine's own clock: prefill {prefill_ms:.2f} ms, decode {decode_us:.1f} us a step, {captures} recordings"
    )
    print(f"{'us/step':>9} {'share':>6} {'calls/step':>10} {'us/call':>8}  kernel")
    rows = []
    lines = [summary, idle, *({**vars(k), "kernel": k.name} for k in kernels[:SHOWN_KERNELS])]
    for line in lines:
        per_call = line["microseconds"] / max(1, line["calls"])
        print(f"{line['microseconds'] / steps:9.2f} {line['microseconds'] / wall:6.1%} {line['calls'] / steps:10.2f} "
              f"{per_call:8.2f}  {line['kernel'][:90]}")  # fmt: skip
        rows.append({
            "shape": args.shape, "batch": batch, "context": args.context, "new_tokens": steps, "dtype": args.dtype,
            "kernel": line["kernel"], "microseconds_per_step": round(line["microseconds"] / steps, 3),
            "calls_per_step": round(line["calls"] / steps, 3), "share": round(line["microseconds"] / wall, 4),
            "clock_microseconds_per_step": round(wall / steps, 2),
        })  # fmt: skip
    sys.stdout.flush()
    return rows


def main() -> int:
    """Measures, prints, writes; 1 when a batch could not be profiled."""
    args = parse_arguments()
    model = SHAPES[args.shape].build(args.context + args.new_tokens, DTYPES[args.dtype], args.device)
    engine = build_engine(model, args.dtype, args.context + args.new_tokens)
    failed = []
    for batch in args.batch:
        try:
            rows = measure(engine, batch, args)
        except Exception as error:  # the next batch may well run
            failed.append(batch)
            print(f"batch {batch} FAILED: {type(error).__name__}: {error}", flush=True)
            continue
        append_rows(args.csv, [row | environment(args.device) for row in rows])
    print(f"batches {args.batch} profiled" + (f"; FAILED: {failed}" if failed else ""))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
