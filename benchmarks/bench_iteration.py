"""A whole iteration of RLHF, rollout and training step, of OPT-1.3B: the goal is what DeepSpeed publishes.

    python benchmarks/bench_iteration.py            # on a GPU: 8 prompts of 256 tokens, 128 new ones, bf16
    python benchmarks/bench_iteration.py --small

As DeepSpeed's hybrid engine counts it, an iteration lasts from one `eval()` of the actor to the next: `generate()`,
which samples here, `train()`, a forward and a backward pass over prompts and answers and a step of AdamW with fp32
masters. Here the loss is PPO's, with noise for advantages. No critic, no reference and no reward model runs; whether
any did in the published figure, it does not say. Weights are random, and dropout is OPT's own. Rollouts and training
steps are timed one by one, which waits for the device in between. Before that the rollout's log-probabilities are
held against the trainer's.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import torch
from bench_ppo_step import EngineStep, check, measure
from common import DTYPES, append_rows, environment, parse_run, run_options
from decode_shapes import SHAPES

GOAL_MS = 503.5
"""An iteration of OPT-1.3B on an H100, 8 x (256 + 128) tokens, with DeepSpeed's CUDA graphs. Its rollout has 2,840
tokens a second, so that 360 ms are the rollout's."""
WARM_UPS = 2
"""Iterations that are not timed: steps are recorded in the first ones."""


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """A model of `decode_shapes.py`, a batch of prompts and how it is cut for training."""

    model: str
    prompts: int
    prompt_tokens: int
    new_tokens: int
    micro_batch: int


FULL = Iteration(model="opt-1.3b", prompts=8, prompt_tokens=256, new_tokens=128, micro_batch=8)
SMALL = Iteration(model="opt-3m", prompts=4, prompt_tokens=16, new_tokens=8, micro_batch=2)


def measure_iterations(shape: Iteration, args: argparse.Namespace) -> dict[str, Any]:
    """The row: medians of so many iterations after those that warm up."""
    model: Any = SHAPES[shape.model].build(shape.prompt_tokens + shape.new_tokens, DTYPES[args.dtype], args.device)
    generator = torch.Generator().manual_seed(1)
    size = (shape.prompts, shape.prompt_tokens)
    prompts = torch.randint(3, model.config.vocab_size, size, generator=generator).to(args.device)
    step = EngineStep(model, args.dtype, shape)  # type: ignore[arg-type]
    check(step, prompts, args.dtype, shape)  # type: ignore[arg-type]
    runs = []
    for number in range(-WARM_UPS, args.repeats):
        found = measure(step, prompts, args.device)
        print(f"{number}: rollout {found[0] * 1e3:.1f} ms, training step {found[1] * 1e3:.1f} ms", flush=True)
        if number >= 0:
            runs.append(found)
    rollout, update = (statistics.median(run[part] for run in runs) for part in (0, 1))
    whole = statistics.median(run[0] + run[1] for run in runs)
    return {
        **vars(shape), "dtype": args.dtype, "rollout_ms": round(rollout * 1e3, 1), "update_ms": round(update * 1e3, 1),
        "iteration_ms": round(whole * 1e3, 1), "peak_bytes": max(run[2] for run in runs),
        "rollout_tokens_per_second": round(shape.prompts * shape.new_tokens / rollout),
    }  # fmt: skip


def main() -> int:
    """Measures, prints, writes."""
    parser = run_options(__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if torch.cuda.is_available() else "float32")
    args = parse_run(parser, "iteration")
    shape = SMALL if args.small else FULL
    row = measure_iterations(shape, args)
    append_rows(args.csv, [row | environment(args.device)])
    told = (f"an iteration of {shape.model} takes {row['iteration_ms']} ms, {row['rollout_ms']} for the rollout "
            f"({row['rollout_tokens_per_second']} tokens/s) and {row['update_ms']} for the training step")  # fmt: skip
    if shape == FULL:
        told += f"; goal {GOAL_MS}: {'met' if row['iteration_ms'] <= GOAL_MS else 'missed'}"
    print(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
