"""What each process of bench_train.py does: the check, the timed steps in turns, and one loop's memory alone."""

import time
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from common import peak_memory, timed
from train_loops import Case, TrainingLoop, TrainShape, build_batch, build_loop

from hybrid_engine.distributed.processes import get_rank

KINDS = ("engine", "plain")
CHECKED_STEPS = 3
# Largest relative difference that rounding explains; the checked steps move the weights by about 0.1. FSDP2 in bf16
# keeps reduced gradients in fp32, our bf16 parameters round them once more.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


@dataclass(frozen=True)
class Paired:
    """What one process measured of both loops."""

    seconds: dict[str, list[float]]
    """Of the timed steps, by loop; those at one place were taken one right after the other."""
    cpu_seconds: dict[str, list[float]]
    """What the threads of this process worked in them: others' load hardly changes it."""
    loss_difference: float
    """Of the checked steps, all as one vector in its 2-norm."""
    weight_difference: float
    """After the checked steps: largest of any parameter, in its 2-norm."""
    num_parameters: int
    threads: int


def measure_paired(case: Case, shape: TrainShape, device: str, repeats: int, built: tuple[str, ...]) -> Paired:
    """Both loops in one process, built in the order of `built`.

    Step by step in turns, each pair in the other order than the one before.
    """
    loops = {kind: build_loop(kind, case, shape, device) for kind in built}
    loss_difference, weight_difference = check(case, loops, shape, device)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cpu_seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for repeat in range(repeats):
        batch = build_batch(shape, device, CHECKED_STEPS + repeat, get_rank())
        for kind in KINDS if repeat % 2 else reversed(KINDS):
            if dist.is_initialized():
                dist.barrier()
            start = time.process_time()
            seconds[kind].append(timed(partial(loops[kind].step, batch), device)[0])
            cpu_seconds[kind].append(time.process_time() - start)
    num_parameters = sum(weight.numel() for weight in loops["engine"].weights().values())
    return Paired(seconds, cpu_seconds, loss_difference, weight_difference, num_parameters, torch.get_num_threads())


def check(case: Case, loops: dict[str, TrainingLoop], shape: TrainShape, device: str) -> tuple[float, float]:
    """Trains both a few steps, which also warms up; returns the differences of losses and weights.

    Raises RuntimeError if they are more than rounding.
    """
    losses: dict[str, list[torch.Tensor]] = {kind: [] for kind in KINDS}
    for step in range(CHECKED_STEPS):
        for kind, loop in loops.items():
            losses[kind] += loop.step(build_batch(shape, device, step, get_rank()))
    differences = (
        relative_difference(torch.stack(losses["engine"]), torch.stack(losses["plain"])),
        largest_difference(loops["engine"].weights(), loops["plain"].weights()),
    )
    if not max(differences) <= TOLERANCE[case.dtype]:
        raise RuntimeError(
            f"{case.name}: after {CHECKED_STEPS} steps losses differ by {differences[0]:.2g} and weights by "
            f"{differences[1]:.2g}, rounding explains {TOLERANCE[case.dtype]:g}"
        )
    return differences


def largest_difference(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of any parameter."""
    if actual.keys() != expected.keys():
        raise RuntimeError(f"the loops train other parameters: {sorted(actual.keys() ^ expected.keys())}")
    return max(relative_difference(actual[name], expected[name]) for name in expected)


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """2-norm of the difference over that of what is expected."""
    return ((actual - expected).norm() / expected.norm()).item()


def measure_peak(kind: str, case: Case, shape: TrainShape, device: str) -> int:
    """Peak bytes of this process, which does nothing but build one loop and take two steps with it.

    Above what an empty process with the libraries loaded holds; on CUDA what the allocator gave out.
    """
    with peak_memory(device) as peak:
        loop = build_loop(kind, case, shape, device)
        for step in range(2):  # the second has the optimizer's state from the beginning
            loop.step(build_batch(shape, device, step, get_rank()))
    return peak.num_bytes
