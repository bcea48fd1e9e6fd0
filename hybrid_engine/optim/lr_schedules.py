"""DeepSpeed's learning-rate schedules WarmupLR, WarmupDecayLR and WarmupCosineLR as PyTorch schedulers.

The other two, LRRangeTest and OneCycle, are in `cycle_schedules.py`.

The engine calls `scheduler.step()` once after each optimizer step that was not skipped. The schedules
count iterations like DeepSpeed: construction is iteration -1, the k-th `step()` is iteration k - 1, and `step(n)`
is iteration n, from which they then count on. So
the first optimizer step runs at iteration -1 and the second at iteration 0, and both see the floor of the
warmup, because a warmup of either type starts at 0 there; the third is the first to see a larger rate.

With W = max(2, warmup_num_steps) and S = total_num_steps, iteration i of the warmup (i < W) stands at

    log(i + 1) / log(W)    for warmup_type "log"
    i / W                  for warmup_type "linear"

of the way from the floor to the peak; what follows is said at each class. Source of the formulas: DeepSpeed,
`runtime/lr_schedules.py`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hybrid_engine.config import SchedulerConfig
from hybrid_engine.config.checks import check_integer, check_number, whole_number
from hybrid_engine.config.notices import say_once
from hybrid_engine.config.optimizer import PER_GROUP
from hybrid_engine.optim.cycle_schedules import LRRangeTest, OneCycle
from hybrid_engine.optim.iteration_schedule import IterationSchedule, check_last_batch_iteration, per_group


def warmup_fraction(iteration: int, warmup_num_steps: int, warmup_type: str) -> float:
    """How far the warmup has come at `iteration`, from 0 (the floor) to 1 (the peak)."""
    if iteration < 0:
        return 0.0
    if warmup_type == "log":
        return math.log(iteration + 1) / math.log(warmup_num_steps)
    return iteration / warmup_num_steps


class _WarmupSchedule(IterationSchedule):
    """What the three schedules share: the checked warmup."""

    def __init__(self, optimizer: torch.optim.Optimizer, warmup_num_steps: int, warmup_type: str):
        check_number("warmup_num_steps", warmup_num_steps, 0)
        check_integer("warmup_num_steps", whole_number(warmup_num_steps), 0)
        if warmup_type not in ("log", "linear"):
            raise ValueError(f'{warmup_type=} must be "log" or "linear"; "log" is the default')
        # DeepSpeed's lower bound of 2, below which the logarithm that divides would be 0.
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = warmup_type
        super().__init__(optimizer)  # takes the first step, to iteration -1

    def _warmup(self) -> float:
        return warmup_fraction(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)


class WarmupLR(_WarmupSchedule):
    """From `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` iterations, constant from then on.

    Args:
        optimizer: its groups' `lr` is set.
        warmup_min_lr: the floor, one number or one per parameter group.
        warmup_max_lr: the peak, likewise; None takes each parameter group's own `lr`.
        warmup_num_steps: iterations of warmup; 0 and 1 count as 2.
        warmup_type: "log" or "linear".

    Raises:
        ValueError: for a list of the wrong length, a negative number of steps or another type.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        check_last_batch_iteration(last_batch_iteration)
        peak = [group["lr"] for group in optimizer.param_groups] if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = per_group("warmup_min_lr", warmup_min_lr, len(optimizer.param_groups))
        self.max_lrs = per_group("warmup_max_lr", peak, len(optimizer.param_groups))
        super().__init__(optimizer, warmup_num_steps, warmup_type)

    def get_lr(self) -> list[float]:
        """The rate of each parameter group at the current iteration."""
        fraction = self._fraction()
        return [low + (high - low) * fraction for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _fraction(self) -> float:
        return self._warmup() if self.last_batch_iteration < self.warmup_num_steps else 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then a straight line from the peak at iteration W down to `warmup_min_lr` at iteration S.

    At iteration i >= W the rate stands at max(0, (S - i) / max(1, S - W)) between floor and peak.

    Args:
        total_num_steps: S, the optimizer steps of the whole run; the others are as in `WarmupLR`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        check_last_batch_iteration(last_batch_iteration)
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)
        _warn_if_short(total_num_steps, self.warmup_num_steps)

    def _fraction(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return self._warmup()
        window = max(1, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, (self.total_num_steps - self.last_batch_iteration) / window)


class WarmupCosineLR(_WarmupSchedule):
    """From a share of each group's own `lr` up to that `lr`, then down half a cosine to another share of it.

    At iteration i >= W the rate is lr * (c + (1 - c) * (1 + cos(pi * p)) / 2) with c = cos_min_ratio and
    p = min(1, (i - W + 1) / max(1, S - W)). At iteration -1, the first optimizer step, it is 0.

    Args:
        optimizer: its groups' `lr` at construction is the peak.
        total_num_steps: S, the optimizer steps of the whole run.
        warmup_min_ratio: the share of the peak at iteration 0.
        warmup_num_steps: iterations of warmup.
        cos_min_ratio: the share of the peak at the end.
        warmup_type: "log" or "linear".
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        check_last_batch_iteration(last_batch_iteration)
        self.total_num_steps = total_num_steps
        check_number("warmup_min_ratio", warmup_min_ratio, 0)
        check_number("cos_min_ratio", cos_min_ratio, 0)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        super().__init__(optimizer, warmup_num_steps, warmup_type)
        _warn_if_short(total_num_steps, self.warmup_num_steps)

    def get_lr(self) -> list[float]:
        """The rate of each parameter group at the current iteration."""
        ratio = self._ratio()
        return [lr * ratio for lr in self.base_lrs]

    def _ratio(self) -> float:
        if self.last_batch_iteration < 0:
            return 0.0
        if self.last_batch_iteration < self.warmup_num_steps:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self._warmup()
        window = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (self.last_batch_iteration - self.warmup_num_steps + 1) / window)
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2


SCHEDULES: dict[str, Any] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
    "LRRangeTest": LRRangeTest,
    "OneCycle": OneCycle,
}
VALID_LR_SCHEDULES = list(SCHEDULES)
"""DeepSpeed's name of that list, by which accelerate tells its schedules from others."""


def build_scheduler(config: SchedulerConfig, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The schedule that the `scheduler` block of the config describes, over `optimizer`."""
    cls = SCHEDULES[config.type] if config.type in SCHEDULES else getattr(torch.optim.lr_scheduler, config.type)
    schedule: LRScheduler = cls(optimizer, **config.params)
    return schedule


def check_rates(config: SchedulerConfig, num_groups: int) -> None:
    """Raises ValueError for a list of rates in the `scheduler` block that has not one for each parameter group."""
    for name in PER_GROUP:
        value = config.params.get(name)
        if isinstance(value, (list, tuple)):
            per_group(f"scheduler.params.{name}", value, num_groups)


def _warn_if_short(total_num_steps: int, warmup_num_steps: int) -> None:
    if total_num_steps < warmup_num_steps:
        say_once(f"{total_num_steps=} is below {warmup_num_steps=}: the learning rate never decays")
