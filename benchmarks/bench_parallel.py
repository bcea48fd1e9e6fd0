"""What `parallelize` costs a training step: beside the plain module on one process, beside plain FSDP2 on two.

    python benchmarks/bench_parallel.py               # a Llama of 17M parameters, 8 x 128 tokens a process, fp32
    python benchmarks/bench_parallel.py --only "graph, 1 process"
    python benchmarks/bench_parallel.py --small

A step is forward, backward and Adam. On two processes (gloo, `dp` with ZeRO) the other is FSDP2's `fully_shard` of the
same model with the same units: its layers and the rest under the eager lowering, all at once under the graph lowering.
Losses and weights are compared before anything is timed. Then steps of both alternate, each pair in the other order
than the one before; half of the pairs are of processes that built ours first, half of such that built the other first.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import common
import torch
import torch.distributed as dist
from processes import run_fresh
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from hybrid_engine.distributed.processes import get_rank, get_world_size
from hybrid_engine.extensions.parallelize.graph.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.optimizer import build_optimizer
from hybrid_engine.extensions.parallelize.parallelize import parallelize

TOKENS = {"full": (8, 128), "small": (2, 32)}
KINDS = ("ours", "plain")
CHECKED_STEPS = 2
TOLERANCE = 1e-5
"""Of losses and weights, relative: on two processes sums may be made in another order."""
ADAM: dict[str, Any] = {"lr": 1e-4, "eps": 1e-6}
Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """What is compared, and its goal for ours by theirs."""

    lowering: str
    num_processes: int
    goal: float

    @property
    def name(self) -> str:
        return f"{self.lowering}, {self.num_processes} process{'es' * (self.num_processes > 1)}"


CASES = [Case("eager", 1, 1.03), Case("graph", 1, 1.3), Case("eager", 2, 1.0), Case("graph", 2, 1.0)]


@dataclass(frozen=True)
class Paired:
    """What one process measured of pairs of steps."""

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    """What the threads of this process worked: others on the machine hardly change it. Waiting is not in it."""


def build_model(shape: str) -> LlamaForCausalLM:
    """The same random weights at every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        common.llama_config(common.SMALL if shape == "small" else common.FULL, TOKENS[shape][1], use_cache=False)
    )


def ids_of(shape: str, step: int) -> Tensor:
    """The tokens of one step of this process."""
    generator = torch.Generator().manual_seed(1000 * step + get_rank())
    return torch.randint(0, 512, TOKENS[shape], generator=generator)


def planned(case: Case, shape: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Ours: `dp`, with ZeRO where there are several processes."""
    size = get_world_size()
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=size, use_zero=size > 1, lowering=case.lowering)
    ids = ids_of(shape, 0)
    with tempfile.TemporaryDirectory() as folder:
        module = parallelize(build_model(shape), {"input_ids": ids, "labels": ids}, "dp", config, gen_savedir=folder)
    return module, build_optimizer(module, torch.optim.Adam, **ADAM)


def plain(case: Case, shape: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The module itself, sharded by FSDP2 where there are several processes; gradients are summed there too."""
    module: nn.Module = build_model(shape)
    if get_world_size() > 1:
        layers = list(module.model.layers) if case.lowering == "eager" else []
        for part in (*layers, module):
            sharded = fully_shard(part, reshard_after_forward=False)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
    return module, torch.optim.Adam(module.parameters(), **ADAM)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    """One step; the loss before it."""
    optimizer.zero_grad()
    loss: Tensor = module(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def measure(case: Case, shape: str, repeats: int, built: tuple[str, ...]) -> Paired:
    """Both in one process, built in the order of `built`, compared and then timed in turns."""
    pairs = {kind: {"ours": planned, "plain": plain}[kind](case, shape) for kind in built}
    check(case, pairs, shape)
    found = Paired({kind: [] for kind in KINDS}, {kind: [] for kind in KINDS})
    for repeat in range(repeats):
        ids = ids_of(shape, CHECKED_STEPS + repeat)
        for kind in KINDS if repeat % 2 else reversed(KINDS):
            if dist.is_initialized():
                dist.barrier()
            start = time.process_time()
            found.seconds[kind].append(common.timed(partial(train, *pairs[kind], ids), "cpu")[0])
            found.cpu_seconds[kind].append(time.process_time() - start)
    return found


def check(case: Case, pairs: dict[str, tuple[nn.Module, torch.optim.Optimizer]], shape: str) -> None:
    """Trains both; RuntimeError where losses or weights differ by more than rounding."""
    losses: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for step in range(CHECKED_STEPS):
        for kind, pair in pairs.items():
            losses[kind].append(train(*pair, ids_of(shape, step)))
    ours, theirs = (chain(losses[kind], whole_weights(pairs[kind][0])) for kind in KINDS)
    differences = [float((one - other).norm() / other.norm()) for one, other in zip(ours, theirs, strict=True)]
    if not max(differences) <= TOLERANCE:
        raise RuntimeError(f"{case.name}: losses or weights differ by {max(differences):.2g}, at most {TOLERANCE} may")


def whole_weights(module: nn.Module) -> list[Tensor]:
    """The module's parameters in its order, each whole; collective."""
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in module.parameters()]


def ratios(runs: list[list[Paired]], which: str) -> list[float]:
    """Ours by theirs, of each pair of steps the slowest process's, of the pairs of both orders of building one."""
    by_order = []
    for processes in runs:
        times = [getattr(one, which) for one in processes]
        slowest = {kind: [max(values) for values in zip(*(t[kind] for t in times), strict=True)] for kind in KINDS}
        by_order.append([one / other for one, other in zip(slowest["ours"], slowest["plain"], strict=True)])
    return [(one * other) ** 0.5 for one, other in zip(*by_order, strict=True)]


def main() -> None:
    parser = common.run_options(__doc__, repeats=6)
    parser.add_argument("--only", help="one case, by its name")
    options = common.parse_run(parser, "parallel")
    shape = "small" if options.small else "full"
    for case in CASES:
        if options.only not in (None, case.name):
            continue
        orders = (KINDS, KINDS[::-1])
        runs = [run_fresh(measure, case.num_processes, "cpu", 1, case, shape, options.repeats, one) for one in orders]
        step_s = statistics.median(chain(*(processes[0].seconds["plain"] for processes in runs)))
        wall, cpu = (common.Quantiles.of(ratios(runs, which)) for which in ("seconds", "cpu_seconds"))
        print(
            f"{case.name}: a plain step takes {step_s:.2f} s, ours {wall.p50:.3f} ({wall.p20:.3f} to {wall.p80:.3f}) "
            f"times that, of the processor's time {cpu.p50:.3f} ({cpu.p20:.3f} to {cpu.p80:.3f}); goal {case.goal}",
            flush=True,
        )
        row = {
            "case": case.name,
            "shape": shape,
            "tokens": TOKENS[shape][0] * TOKENS[shape][1],
            "pairs": 2 * options.repeats,
            "plain_step_s": round(step_s, 4),
            "goal": case.goal,
        }
        for name, found in (("ratio", wall), ("cpu_ratio", cpu)):
            row |= {f"{name}_p20": round(found.p20, 4), f"{name}_p50": round(found.p50, 4)}
            row |= {f"{name}_p80": round(found.p80, 4)}
        common.append_rows(options.csv, [row | common.environment("cpu") | {"threads": 1}])


if __name__ == "__main__":
    main()
