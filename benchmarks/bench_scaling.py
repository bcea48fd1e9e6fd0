"""How far it scales: bytes per step counted on this machine's processes, and the same formulas for large machines.

    python benchmarks/bench_scaling.py > docs/scaling.md

First every collective of an optimizer step and of a rollout is counted, on 2 and on 4 gloo processes, and compared
with `traffic.py`; a difference ends the run. Then the formulas say what three models need on H100s, at the published
rates of links and chips: the least seconds, not what anybody measured.
"""

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from common import environment
from processes import run_fresh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from traffic import Training, ring_seconds
from transformers import LlamaConfig, LlamaForCausalLM

NUM_MICRO_BATCHES = 2
SMALL = 8192  # bytes: all-reduces of norms, verdicts and counters are not gradients

# NVIDIA's H100 SXM data sheet: 989 TFLOP/s dense bf16, 80 GB, NVLink 900 GB/s both ways; InfiniBand NDR: 400 Gb/s.
PEAK_FLOPS, HBM_BYTES, NVLINK, INFINIBAND, NODE = 989e12, 80e9, 450e9, 50e9, 8


class CountCollectives(TorchDispatchMode):
    """Bytes of the largest tensor of each collective, by its kind."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            sizes = [t.numel() * t.element_size() for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            kind = function.__name__.split(".")[0].strip("_")
            if kind != "allreduce" or max(sizes) > SMALL:
                self.bytes[kind] += max(sizes, default=0)
        return function(*args, **(kwargs or {}))


def count(config: dict[str, Any]) -> tuple[Training, dict[str, Counter[str]]]:
    """One optimizer step and, with containers, one rollout of a small Llama on this process."""
    import hybrid_engine

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    groups = {name: param.numel() for name, param in model.named_parameters()}
    options = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": NUM_MICRO_BATCHES}
    engine, *_ = hybrid_engine.initialize(model=model, config={**options, "optimizer": {"type": "AdamW"}, **config})
    tokens = torch.arange(16)[None]
    counted = {}
    for _ in range(2):  # the first step makes what later ones have
        with CountCollectives() as step:
            for _ in range(NUM_MICRO_BATCHES):
                engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                engine.step()
    counted["step"] = step.bytes
    if "hybrid_engine" in config:
        engine.eval()
        with CountCollectives() as rollout:
            engine.generate(tokens[:, :4], max_new_tokens=4)
        counted["rollout"] = rollout.bytes
    training = Training(
        num_parameters=sum(groups.values()),
        num_root_parameters=sum(n for name, n in groups.items() if ".layers." not in name),
        param_bytes=2 if "bf16" in config else 4,
        stage=config["zero_optimization"]["stage"],
        num_micro_batches=NUM_MICRO_BATCHES,
    )
    return training, counted


@dataclass(frozen=True, kw_only=True)
class Counted:
    """A config, what it should exchange and what it did."""

    name: str
    num_processes: int
    expected: dict[str, int]
    found: dict[str, int]


def count_all(num_processes: int) -> list[Counted]:
    """Every stage, and shards within half of the processes; raises SystemExit where a count is not the formula's."""
    generates = {"hybrid_engine": {"enabled": True, "print_latency": False}, "bf16": {"enabled": True}}
    configs: dict[str, dict[str, Any]] = {
        f"stage {stage}": {"zero_optimization": {"stage": stage}} for stage in range(3)
    }
    configs["stage 3, bf16"] = {"zero_optimization": {"stage": 3}, **generates}
    shared = {"enabled": True, "inference_tp_size": 2, "print_latency": False}
    configs["stage 3, 2 generate together"] = {"zero_optimization": {"stage": 3}, "hybrid_engine": shared}
    if num_processes > 2:
        halves = {"stage": 3, "mics_shard_size": num_processes // 2}
        configs["stage 3 within halves, bf16"] = {"zero_optimization": halves, **generates}
    rows = []
    for name, config in configs.items():
        training, counted = run_fresh(count, num_processes, "cpu", 1, config)[0]
        shard_size = num_processes // 2 if "halves" in name else num_processes
        row = Counted(
            name=name,
            num_processes=num_processes,
            expected=_expected(training, num_processes, shard_size, "together" in name),
            found=_found(counted),
        )
        # Slices of tensors that are not cut (norms) are whole, and shards are padded: 2 % at these sizes.
        wrong = [kind for kind, size in row.expected.items() if abs(row.found[kind] - size) > 0.02 * max(size, SMALL)]
        if wrong:
            sys.exit(f"{name} on {num_processes} processes: {wrong} counted {row.found}, by formula {row.expected}")
        rows.append(row)
    return rows


def _expected(training: Training, num_processes: int, shard_size: int, is_shared: bool) -> dict[str, int]:
    replicates = training.stage == 0 or shard_size < num_processes
    return {
        "gathered": training.gathered_bytes(),
        "scattered": training.scattered_bytes(),
        "all-reduced": training.all_reduced_bytes(shard_size) if replicates else 0,
        "rollout": training.rollout_bytes(2 if is_shared else 1) if training.param_bytes == 2 or is_shared else 0,
    }


def _found(counted: dict[str, Counter[str]]) -> dict[str, int]:
    step, rollout = counted["step"], counted.get("rollout", Counter())
    return {
        "gathered": step["allgather_base"],
        "scattered": step["reduce_scatter_base"],
        "all-reduced": step["allreduce"],
        "rollout": rollout["alltoall_base"] or rollout["allgather_base"],
    }


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on H100s."""

    name: str
    num_parameters: float
    num_active: float
    """Parameters that a token passes through."""
    root_parameters: float
    num_devices: int
    shard_size: int
    tensor_parallel: int


CASES = [
    Case(name="7B on 8", num_parameters=6.7e9, num_active=6.7e9, root_parameters=0.26e9, num_devices=8, shard_size=8,
         tensor_parallel=1),
    Case(name="70B on 64", num_parameters=69e9, num_active=69e9, root_parameters=0.52e9, num_devices=64, shard_size=64,
         tensor_parallel=8),
    Case(name="70B on 64, shards in a node", num_parameters=69e9, num_active=69e9, root_parameters=0.52e9,
         num_devices=64, shard_size=8, tensor_parallel=8),
    Case(name="400B MoE (17B active) on 512", num_parameters=400e9, num_active=17e9, root_parameters=2e9,
         num_devices=512, shard_size=512, tensor_parallel=8),
]  # fmt: skip
TOKENS = 16384  # of a micro-batch of one device
MFU = 0.4


def describe(case: Case) -> list[str]:
    """One row of the table: memory, seconds of computing and of each exchange, and whether a rollout fits."""
    training = Training(
        num_parameters=int(case.num_parameters),
        num_root_parameters=int(case.root_parameters),
        param_bytes=2,
        stage=3,
    )
    compute = 6 * case.num_active * TOKENS / (PEAK_FLOPS * MFU)
    link = NVLINK if case.shard_size <= NODE else INFINIBAND
    gather = ring_seconds(training.gathered_bytes(), case.shard_size, link)
    scatter = ring_seconds(training.scattered_bytes(), case.shard_size, link)
    copies = case.num_devices // case.shard_size
    reduce = ring_seconds(training.all_reduced_bytes(case.shard_size), copies, INFINIBAND, is_all_reduce=True)
    held = training.rollout_bytes(case.tensor_parallel)
    kept = training.kept_bytes(case.shard_size)
    fits = "yes" if held + kept < 0.9 * HBM_BYTES else "no"
    rollout = ring_seconds(held, case.shard_size, link)
    exchange = gather + scatter + (reduce if copies > 1 else 0.0)
    return [
        case.name, f"{kept / 1e9:.0f}", f"{compute:.2f}", f"{gather:.2f}", f"{scatter:.2f}",
        f"{reduce:.2f}" if copies > 1 else "", f"{exchange / compute:.2f}", f"{held / 1e9:.0f}", f"{rollout:.2f}", fits,
    ]  # fmt: skip


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Counts, compares, and prints docs/scaling.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    counted = [row for n in parser.parse_args().processes for row in count_all(n)]
    kinds = ["gathered", "scattered", "all-reduced", "rollout"]
    rows = [
        [row.name, str(row.num_processes), *(f"{row.found[kind]:,} ({row.expected[kind]:,})" for kind in kinds)]
        for row in counted
    ]
    header = ["model on H100s", "GB kept", "computing", "gathers", "reduce-scatters", "all-reduces"]
    header += ["exchange over computing", "GB of weights in a rollout", "its gather", "fits 80 GB"]
    print(
        PAGE.format(
            counted=table(["config", "processes", *kinds], rows),
            cases=table(header, [describe(case) for case in CASES]),
            tokens=TOKENS,
            mfu=MFU,
            **environment("cpu"),
        ),
        end="",
    )


PAGE = """# How far it scales, and why it stops

Written by `python benchmarks/bench_scaling.py`; the formulas are in [benchmarks/traffic.py](../benchmarks/traffic.py).

## Counted here

Bytes of all collectives of one optimizer step (two micro-batches) and of one rollout, small Llama, gloo; in brackets
what the formula says. Norms, counters and verdicts of some bytes are left out. torch {torch}, transformers
{transformers}, commit {commit}.

{counted}

Stages 0 and 1 reduce once a step, stages 2 and 3 at every micro-batch; stage 3 gathers every layer twice a micro-batch.
A rollout gathers the weights once, whatever its length, or each process its slice where some generate together.

## By formula, for large machines

The least seconds of one micro-batch of {tokens} tokens on each device, stage 3, bf16, at the published rates: computing
at {mfu:.0%} of 989 TFLOP/s; NVLink 450 GB/s each way inside a node of 8, InfiniBand 50 GB/s a device between nodes; a
group that leaves the node runs at InfiniBand's rate. FSDP2 overlaps exchange with computing, so a ratio below 1 can
hide. Nothing of this was measured on such machines.

{cases}

- **7B on 8**: exchange hides behind computing, the whole weights fit beside the shards: gather once a rollout.
- **70B on 64**: shards over all nodes pay InfiniBand twice a layer and micro-batch; the ratio says how much of it can
  hide. Shards within a node (`zero_optimization.mics_shard_size: 8`) gather at NVLink's rate but keep 8 times as much:
  it does not fit 80 GB, so larger nodes, `offload_optimizer`, or more tokens a micro-batch are what helps.
  `inference_tp_size: 8` keeps the exchange of decoding inside a node and a slice of the weights on each device.
- **400B, a mixture of experts, on 512**: stage 3 gathers all experts for every micro-batch although a token passes
  through a few: bytes follow all parameters, computing follows the active ones. Exchange outweighs computing many
  times, and a node of 8 cannot hold the weights of a rollout. Here data parallelism stops: it takes expert or pipeline
  parallelism, which there is not.

What does not grow: a rollout gathers once; decoding has no collective on one process per model, and two all-reduces a
layer inside the node with `inference_tp_size`. What grows with processes: the ring's latency, one start for each layer
and direction, and the longest answer of all processes, which the others wait for.
"""


if __name__ == "__main__":
    main()
