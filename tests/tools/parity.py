"""Training under every policy, on 1, 2 and 4 processes, with and without ZeRO, beside the module's own.

    python -m tests.tools.parity                          # all of it, an hour on two cores
    python -m tests.tools.parity --processes 4 llama opt

Losses, outputs, gradients and their norms, and the weights after five steps of Adam must be those of the module to
1e-5. Prints a line for each layout; ends with 1 where one differs.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from hybrid_engine import ComputeConfig, build_optimizer, parallelize
from hybrid_engine.extensions.parallelize.planning.autodist import PlanRequest, best_plan
from hybrid_engine.extensions.parallelize.planning.machine import COLLECTIVES, Device, Link, Machine
from hybrid_engine.extensions.parallelize.planning.setting import PlanSetting
from tests.support.distributed import run_distributed
from tests.support.parallel_nets import ADAM
from tests.support.parity_nets import NETS, build_net, sample_for
from tests.support.random_splits import random_plan

NUM_STEPS, NUM_SAMPLES = 5, 4
SLOW_DEVICE = Device(kind="cpu", memory_bytes=1 << 40, flops_per_s={"float32": 1e6}, bytes_per_s=1e6, op_s=0.0)
MACHINE = Machine(
    name="slow devices",
    source="so that plans split what they can",
    device=SLOW_DEVICE,
    processes_per_node=8,
    near=dict.fromkeys(COLLECTIVES, Link(0.0, 1e7)),
    far=dict.fromkeys(COLLECTIVES, Link(0.0, 1e7)),
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a module is trained."""

    policy: str
    plan_ngpus: int = 1
    use_zero: bool = False
    pas_config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.pas_config.items()]
        return " ".join([self.policy, f"plan_ngpus={self.plan_ngpus}", *["ZeRO"] * self.use_zero, *words])


def autodist_stages(graph, config):
    """Stages as `autodist` makes them, as many as `_stages`, and splits in them."""
    setting = PlanSetting(machine=MACHINE, plan_ngpus=config.plan_ngpus, num_micro_batches=config.pas_config["_micros"])
    return best_plan(graph, setting, PlanRequest(num_stages=(config.pas_config["_stages"],)))


def random_splits(graph, config):
    """A split of each op that is drawn."""
    return random_plan(graph, (config.plan_ngpus,), config.pas_config.get("_seed", 1))


POLICIES = {"autodist stages": autodist_stages, "random splits": random_splits}


def layouts_of(num_processes: int) -> list[Layout]:
    """Every policy with and without ZeRO, which has two units where there are several processes."""
    found = []
    for use_zero in (False, True):
        size = max(num_processes // 2, 1) if use_zero else num_processes
        micros = NUM_SAMPLES * size // num_processes
        two = {"plan_ngpus": size, "use_zero": use_zero}
        found += [
            Layout(policy="dp", use_zero=use_zero),
            Layout(policy="data", **two),
            Layout(policy="tp", **two),
            Layout(policy="random splits", **two),
            Layout(policy="pp", pas_config={"pipeline_nmicros": micros}, **two),
            Layout(
                policy="hybrid",
                pas_config={"pipeline_nmicros": micros, "pipeline_nstages": 2 if size > 1 else 1},
                **two,
            ),
            Layout(policy="autodist", **two),
        ]
        if size > 1:
            found.append(Layout(policy="autodist stages", pas_config={"_stages": 2, "_micros": micros}, **two))
    return found


@dataclass
class Training:
    """What a training gave."""

    results: list[list[list[Tensor]]]
    """Of each step, of each sample, the tensors that came back."""
    gradients: dict[str, Tensor]
    """Of the first step."""
    norms: list[float]
    weights: dict[str, Tensor]


def tensors_of(result: Any) -> list[Tensor]:
    return [leaf.detach().clone() for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def plain_training(name: str, num_steps: int = NUM_STEPS) -> Training:
    """The module's own, on the sum of all samples' losses."""
    module = build_net(name)
    optimizer = torch.optim.Adam(module.parameters(), **ADAM)
    found = Training([], {}, [], {})
    for step in range(num_steps):
        optimizer.zero_grad()
        results = [module(sample_for(name, 100 * step + number)) for number in range(NUM_SAMPLES)]
        for result in results:
            next(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)).backward()
        found.results.append([tensors_of(result) for result in results])
        if step == 0:
            found.gradients = {key: p.grad.clone() for key, p in module.named_parameters()}
        found.norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.7)))
        optimizer.step()
    found.weights = {key: p.detach() for key, p in module.named_parameters()}
    return found


def planned_training(
    rank: int, num_processes: int, name: str, layout: Layout, folder: Path, num_steps: int
) -> Training:
    """The same under a plan; results of this process's unit, gradients and weights of what it holds."""
    options = dict(layout.pas_config)
    if layout.policy == "autodist":
        if rank == 0:  # which makes the plan
            MACHINE.save(folder / "costs.json")
        options = {"costs": str(folder / "costs.json")} | options
    config = ComputeConfig(
        plan_ngpus=layout.plan_ngpus,
        runtime_ngpus=num_processes,
        use_zero=layout.use_zero,
        use_end2end=True,
        pas_config=options,
    )
    policy = POLICIES.get(layout.policy, layout.policy)
    module = parallelize(
        build_net(name), {"sample": sample_for(name, 0)}, policy, config, gen_savedir=folder, reuse="override"
    )
    optimizer = build_optimizer(module, torch.optim.Adam, **ADAM)
    unit, count = rank // layout.plan_ngpus, NUM_SAMPLES // config.num_units
    found = Training([], {}, [], {})
    for step in range(num_steps):
        samples = [sample_for(name, 100 * step + unit * count + number) for number in range(count)]
        found.results.append([tensors_of(result) for result in module.train_step(samples)])
        optimizer.sync_shard_grad()
        if step == 0:
            found.gradients = {key: whole(p.grad) for key, p in module.named_parameters() if p.numel()}
        found.norms.append(float(optimizer.clip_gnorm(0.7)))
        optimizer.step()
    found.weights = {key: whole(p) for key, p in module.named_parameters() if p.numel()}
    return found


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def difference(expected: Training, found: list[Training], layout: Layout) -> str:
    """What differs from the module's own training, of what all processes found; empty where nothing does."""
    num_units = len(found) // layout.plan_ngpus
    count = NUM_SAMPLES // num_units
    for rank, one in enumerate(found):
        first = rank // layout.plan_ngpus * count
        pairs = {
            "results": ([step[first : first + count] for step in expected.results], one.results),
            "norms": (expected.norms, one.norms),
            "gradients": ({key: expected.gradients[key] for key in one.gradients}, one.gradients),
            "weights": ({key: expected.weights[key] for key in one.weights}, one.weights),
        }
        for what, (wanted, given) in pairs.items():
            for number, (one_leaf, other) in enumerate(zip(*map(pytree.tree_leaves, (wanted, given)), strict=True)):
                relative = distance(torch.as_tensor(one_leaf), torch.as_tensor(other))
                if not relative <= 1e-5:
                    return f"{what} of rank {rank}: tensor {number} of them is {relative:.2g} away"
    held = {key for one in found for key in one.weights}
    missing = sorted(expected.weights.keys() - held)
    return f"no process holds {missing}" if missing else ""


def distance(expected: Tensor, found: Tensor) -> float:
    """The greatest difference of two elements beside the greatest element, or beside 0.01 where all are smaller."""
    if expected.shape != found.shape:
        return float("inf")
    return float((expected - found).abs().max() / expected.abs().max().clamp(min=0.01))


def trainings(
    rank: int, num_processes: int, cases: list[tuple[str, Layout]], folder: Path, num_steps: int
) -> list[Any]:
    """What this process found in each case, or the error that it raised."""
    found: list[Any] = []
    for number, (name, layout) in enumerate(cases):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        dist.barrier()
        try:
            found.append(planned_training(rank, num_processes, name, layout, own, num_steps))
        except Exception as error:
            print(
                f"rank {rank}: {name}, {layout}: {type(error).__name__}: {str(error)[:300]}",
                file=sys.stderr,
                flush=True,
            )
            found.append(error)
    return found


def differences(
    cases: list[tuple[str, Layout]], num_processes: int, folder: Path, num_steps: int = NUM_STEPS
) -> list[str]:
    """What differs in each case."""
    by_rank = run_distributed(trainings, num_processes, cases, folder, num_steps, seconds=100)
    words = []
    for (name, layout), found in zip(cases, zip(*by_rank, strict=True), strict=True):
        error = next((one for one in found if isinstance(one, Exception)), None)
        words.append(
            difference(plain_training(name, num_steps), list(found), layout)
            if error is None
            else f"{type(error).__name__}: {str(error)[-400:]}"
        )
    return words


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", choices=[[], *NETS], help=f"of {', '.join(NETS)}")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4])
    args = parser.parse_args()
    torch.set_num_threads(1)
    num_wrong = num_cases = 0
    for num_processes in args.processes:
        for name in args.models or NETS:
            start = time.perf_counter()
            cases = [(name, layout) for layout in layouts_of(num_processes)]
            with tempfile.TemporaryDirectory() as folder:
                found = differences(cases, num_processes, Path(folder))
            for (_, layout), words in zip(cases, found, strict=True):
                num_cases += 1
                num_wrong += bool(words)
                print(f"{name}, {num_processes} processes, {layout}: {words or 'the same'}", flush=True)
            print(f"{name}, {num_processes} processes: {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{num_cases - num_wrong} of {num_cases} trainings are those of the module")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
