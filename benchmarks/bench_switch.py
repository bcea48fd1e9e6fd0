"""What it costs to switch from training to generating and back: seconds, and memory above the weights.

    python benchmarks/bench_switch.py
    python benchmarks/bench_switch.py --lora
    python benchmarks/bench_switch.py --processes 2 --stage 3

A cycle is `eval()`, a rollout that is as good as empty (one new token for a prompt of one token), `train()`.
Memory is exact, not the resident set: every allocation and deletion of the tensor allocator during a cycle,
as torch's profiler records them (on CUDA the allocator's own peak), so it holds what operators take inside
and storages that are resized. What counts is the most held at once above what was held before the cycle,
without the KV workspace. Two cycles are measured: the engine's first, in which it takes what it keeps,
and a later one. With LoRA the buffers of the fused weights, on several processes the gathered weights,
are extra memory by design; the goal of under 1% of the weights is for one process without LoRA.

Before anything is timed, the weights are compared to the bit with what they were before a cycle.
"""

import argparse
import io
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import (
    DTYPES,
    Quantiles,
    Shape,
    append_rows,
    base_parser,
    environment,
    llama_config,
    parse,
    peak_memory,
    synchronize,
    timed,
)
from peft import LoraConfig, get_peft_model
from processes import run_fresh
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

import hybrid_engine
from hybrid_engine.zero.sharding import local_tensor

GOAL = 0.01
PHASES = ("eval", "generate", "train", "cycle")


@dataclass
class Switch:
    """What one process measured. Extra bytes are above what was held before, without the KV workspace."""

    weight_bytes: int  # of the whole model, adapters included
    held_bytes: int  # of it, on this process between cycles
    kv_bytes: int
    first_bytes: int
    later_bytes: int
    seconds: dict[str, list[float]]  # by phase


def build_module(shape: Shape, dtype: torch.dtype, device: str, rank: int | None) -> nn.Module:
    """A Llama, with rank-`rank` adapters on every linear of its layers unless that is None."""
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(
        llama_config(shape, shape.positions, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    )
    if rank is not None:
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, config)
    return model.to(device, dtype)


def engine_config(args: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """The KV workspace is kept between cycles, so that a later cycle's extra memory is without it."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": args.stage},
        "hybrid_engine": {
            "enabled": True,
            "max_out_tokens": shape.prompt_tokens + shape.new_tokens,
            "pin_parameters": not args.stream,
        },
    }
    if args.dtype != "float32":
        config["bf16" if args.dtype == "bfloat16" else "fp16"] = {"enabled": True}
    return config


def allocated_at_peak(run: Callable[[], Any], skipped: Callable[[int, int], bool]) -> int:
    """Most bytes that the CPU's tensor allocator gave out at once during `run`, beyond those it had given before.

    Runs `run` once. An allocation at `address` of `size` bytes for which `skipped(address, size)` is True
    does not count; it is asked after the run.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        size = event["args"]["Bytes"]
        if not skipped(event["args"]["Addr"], abs(size)):
            held += size
            peak = max(peak, held)
    return peak


def extra_bytes(engine: Any, run: Callable[[], Any], device: str) -> int:
    """Peak of `run` above what was held before it, without a KV workspace that it takes and keeps."""
    workspace = engine.generator.workspace
    before = workspace.allocated_bytes
    if torch.device(device).type == "cuda":
        with peak_memory(device) as peak:
            run()
        return peak.num_bytes - (workspace.allocated_bytes - before)

    def is_workspace(address: int, size: int) -> bool:
        return size == workspace.allocated_bytes and address == workspace.cache.data_ptr()

    return allocated_at_peak(run, is_workspace)


def cycle(engine: Any, prompt: torch.Tensor, barrier: Callable[[], Any], device: str) -> dict[str, float]:
    """One cycle; seconds by phase. `barrier` makes processes begin each phase together."""
    seconds = {}
    phases: dict[str, Callable[[], Any]] = {
        "eval": engine.eval,
        "generate": lambda: engine.generate(prompt, max_new_tokens=1),
        "train": engine.train,
    }
    with redirect_stdout(io.StringIO()):  # eval() prints its latency line
        for name, phase in phases.items():
            synchronize(device)
            barrier()
            seconds[name], _ = timed(phase, device)
    seconds["cycle"] = sum(seconds.values())
    return seconds


def measure(args: argparse.Namespace, shape: Shape) -> Switch:
    """On one process of one or several."""
    module = build_module(shape, DTYPES[args.dtype], args.device, args.rank if args.lora else None)
    weight_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    engine, *_ = hybrid_engine.initialize(model=module, config=engine_config(args, shape))
    barrier = dist.barrier if dist.is_initialized() else (lambda: None)
    prompt = torch.ones(1, 1, dtype=torch.long, device=args.device)

    def run() -> dict[str, float]:
        return cycle(engine, prompt, barrier, args.device)

    engine.train()
    weights = [local_tensor(p).detach().clone() for p in engine.module.parameters()]
    first = extra_bytes(engine, run, args.device)
    changed = [
        not torch.equal(old, local_tensor(p)) for old, p in zip(weights, engine.module.parameters(), strict=True)
    ]
    if any(changed):
        raise RuntimeError(f"{sum(changed)} of {len(changed)} parameters changed in a cycle of eval, generate, train")
    later = extra_bytes(engine, run, args.device)
    cycles = [run() for _ in range(args.repeats)]
    return Switch(
        weight_bytes,
        sum(tensor.nbytes for tensor in weights),
        engine.generator.workspace.allocated_bytes,
        first,
        later,
        {phase: [seconds[phase] for seconds in cycles] for phase in PHASES},
    )


def measure_all(args: argparse.Namespace, shape: Shape) -> list[Switch]:
    """One result per process."""
    return run_fresh(measure, args.processes, args.device, args.threads, args, shape)


def worst(switches: list[Switch]) -> Switch:
    """The process with the most extra memory, with the seconds of the slowest in each phase."""
    most = max(switches, key=lambda switch: max(switch.first_bytes, switch.later_bytes))
    slowest = {
        phase: max((switch.seconds[phase] for switch in switches), key=statistics.median) for phase in most.seconds
    }
    return Switch(**{**asdict(most), "seconds": slowest})


def print_results(console: Console, switch: Switch, setting: str, has_goal: bool) -> None:
    """Two tables and, where there is one, the goal."""
    memory = Table("what", title=f"memory of the process with most: {setting}")
    memory.add_column("bytes", justify="right")
    memory.add_column("of the weights", justify="right")
    for name, count in (
        ("weights, whole", switch.weight_bytes),
        ("weights, held by the process between cycles", switch.held_bytes),
        ("KV workspace of the empty rollout", switch.kv_bytes),
        ("extra besides KV, first cycle, peak", switch.first_bytes),
        ("extra besides KV, later cycle, peak", switch.later_bytes),
    ):
        memory.add_row(name, f"{count:,}", f"{count / switch.weight_bytes:.3%}")
    console.print(memory)
    times = Table("phase", "milliseconds p50 [p20, p80]", title="time of the slowest process")
    for phase in PHASES:
        at = Quantiles.of(switch.seconds[phase])
        times.add_row(phase, f"{at.p50 * 1e3:.2f} [{at.p20 * 1e3:.2f}, {at.p80 * 1e3:.2f}]")
    console.print(times)
    if has_goal:
        share = max(switch.first_bytes, switch.later_bytes) / switch.weight_bytes
        console.print(
            f"goal: under {GOAL:.0%} of the weights; {share:.3%} is {'within' if share < GOAL else 'over'} it"
        )


def csv_row(switch: Switch, args: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """One row."""
    quantiles = {phase: asdict(Quantiles.of(switch.seconds[phase])) for phase in PHASES}
    return {
        "processes": args.processes,
        "stage": args.stage,
        "streamed": args.stream,
        "lora_rank": args.rank if args.lora else 0,
        **{f"{phase}_seconds_{at}": round(v, 6) for phase, values in quantiles.items() for at, v in values.items()},
        **{name: value for name, value in asdict(switch).items() if name != "seconds"},
        "peak_bytes": max(switch.first_bytes, switch.later_bytes),
        **vars(shape),
        "dtype": args.dtype,
        "repeats": args.repeats,
        **environment(args.device),
    }


def parse_arguments() -> tuple[argparse.Namespace, Shape]:
    """The command line; raises ValueError for settings that contradict each other."""
    parser = base_parser(__doc__)
    parser.add_argument("--lora", action="store_true", help="a peft adapter on every linear of the layers")
    parser.add_argument("--rank", type=int, default=8, help="of the adapter (default 8)")
    parser.add_argument("--processes", type=int, default=1, help="gloo processes on this machine's CPU (default 1)")
    parser.add_argument("--stage", type=int, default=0, choices=range(4), help="of ZeRO (default 0)")
    parser.add_argument("--stream", action="store_true", help="gather layer by layer (pin_parameters: false)")
    args, shape = parse(parser, "switch")
    if args.processes > 1 and args.device != "cpu":
        raise ValueError(f"--processes={args.processes} runs on the CPU over gloo; add --device cpu")
    return args, shape


def main() -> None:
    """Measures, prints, writes."""
    args, shape = parse_arguments()
    switch = worst(measure_all(args, shape))
    has_goal = args.processes == 1 and not args.lora and not args.small
    adapters = f", LoRA of rank {args.rank}" if args.lora else ""
    gathering = ", streamed" if args.stream else ""
    setting = f"{args.processes} process(es), stage {args.stage}{gathering}{adapters}, {args.dtype}"
    print_results(Console(width=None if sys.stdout.isatty() else 160), switch, setting, has_goal)
    append_rows(args.csv, [csv_row(switch, args, shape)])


if __name__ == "__main__":
    main()
