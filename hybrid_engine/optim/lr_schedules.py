"""DeepSpeed's learning-rate schedules WarmupLR, WarmupDecayLR and WarmupCosineLR as PyTorch schedulers.

LRRangeTest and OneCycle come after them.

The engine calls `scheduler.step()` once after each optimizer step that was not skipped. The schedules
count iterations like DeepSpeed: construction is iteration -1, the k-th `step()` is iteration k - 1, and `step(n)` is
iteration n, from which counting continues. So the first optimizer step runs at iteration -1 and the second at iteration
0. Both use the floor of the warmup, because a warmup of either type is 0 there; the third is the first with a larger
rate.

With W = max(2, warmup_num_steps) and S = total_num_steps, iteration i of the warmup (i < W) is at

    log(i + 1) / log(W)    for warmup_type "log"
    i / W                  for warmup_type "linear"

of the way from the floor to the peak; each class documents the rest. Source of the formulas: DeepSpeed,
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

# DeepSpeed's value, whatever the optimizer had: beta2 is constant while the momentum is cycled.
CYCLED_BETA2 = 0.99


class IterationSchedule(LRScheduler):
    """Counts iterations one below PyTorch: construction is iteration -1 and the first `step()` is iteration 0.

    `state_dict`, `load_state_dict` and `get_last_lr` are PyTorch's; DeepSpeed's state can be loaded too.
    """

    @property
    def last_batch_iteration(self) -> int:
        """The current iteration; after it is set the rates change at the next `step()`."""
        return self.last_epoch - 1

    @last_batch_iteration.setter
    def last_batch_iteration(self, iteration: int) -> None:
        self.last_epoch = iteration + 1

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Sets the rates of the next iteration, or of the given one, from which counting continues."""
        if last_batch_iteration is not None:
            self.last_batch_iteration = last_batch_iteration - 1
        super().step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from `state_dict`; DeepSpeed's holds only the iteration."""
        if state_dict.keys() == {"last_batch_iteration"}:
            self.last_batch_iteration = state_dict["last_batch_iteration"]
        else:
            super().load_state_dict(state_dict)


def per_group(name: str, value: float | Sequence[float], num_groups: int) -> list[float]:
    """One rate per parameter group; raises ValueError for a list of another length."""
    if not isinstance(value, (list, tuple)):
        value = [value] * num_groups  # type: ignore[list-item]
    for rate in value:
        check_number(name, rate, 0)
    if len(value) != num_groups:
        raise ValueError(f"{name}={value} has {len(value)} rates for {num_groups} parameter groups; give one for each")
    return list(value)


def check_last_batch_iteration(value: int) -> None:
    """Raises ValueError for a start at another iteration than the first, which DeepSpeed's schedules accept."""
    if value != -1:
        raise ValueError(
            f"last_batch_iteration={value} is not supported; load_checkpoint() continues a schedule, and step({value}) "
            "sets the iteration"
        )


class LRRangeTest(IterationSchedule):
    """A rate that only grows, to find where training diverges.

    At iteration i it is min_lr * (1 + step_rate * n) with n = (i + 1) / step_size, rounded down under `staircase`;
    at construction it is min_lr.

    Args:
        optimizer: its groups' `lr` is set.
        lr_range_test_min_lr: the first rate, one number or one per parameter group.
        lr_range_test_step_size: iterations in which it grows by `step_rate` times `min_lr`.
        lr_range_test_step_rate: that growth.
        lr_range_test_staircase: whether it grows at once at the end of each step size.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ):
        check_last_batch_iteration(last_batch_iteration)
        self.min_lrs = per_group("lr_range_test_min_lr", lr_range_test_min_lr, len(optimizer.param_groups))
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.is_staircase = lr_range_test_staircase
        super().__init__(optimizer)

    def step(self, batch_iteration: int | None = None) -> None:
        """Sets the rates of the next iteration, or of the given one."""
        super().step(batch_iteration)

    def get_lr(self) -> list[float]:
        """The rate of each parameter group at the current iteration."""
        interval = self.last_epoch / self.step_size
        growth = 1 + self.step_rate * (math.floor(interval) if self.is_staircase else interval)
        return [rate * growth for rate in self.min_lrs]


class OneCycle(IterationSchedule):
    """A rate that rises and falls once and then decays, with a momentum (beta1) that moves in the opposite direction.

    With F and S the sizes of the two halves, iteration i < F + S is at x = i + 1 of the cycle: x / F of the way from
    `cycle_min_lr` to `cycle_max_lr` up to x = F, then (F + S - x) / S. Stairs round that fraction down. Later, with n =
    (i - F - S + 1) / decay_step_size, the rate is cycle_min_lr / (1 + decay_lr_rate n) and the momentum cycle_max_mom
    (1 + decay_mom_rate n); without decay they are constant.

    Args:
        optimizer: its groups' `lr` is set, and `betas`, if it has any and `cycle_momentum`.
        cycle_first_step_size: F, iterations.
        cycle_second_step_size: S; None takes F.
        cycle_first_stair_count: stairs of the first half; 0 is continuous.
        cycle_second_stair_count: stairs of the second half; None takes those of the first.
        decay_step_size: iterations of one unit of decay; 0 disables decay.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ):
        check_last_batch_iteration(last_batch_iteration)
        check_number("cycle_min_lr", cycle_min_lr, 0)
        check_number("cycle_max_lr", cycle_max_lr, 0)
        self.lr_range = (cycle_min_lr, cycle_max_lr)
        self.momentum_range = (cycle_min_mom, cycle_max_mom)
        self.sizes = (cycle_first_step_size, cycle_second_step_size or cycle_first_step_size)
        second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.stairs = (cycle_first_stair_count, second_stairs)
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.cycles_momentum = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self.cycles_momentum:
            say_once(f"OneCycle: {type(optimizer).__name__} has no betas, its momentum is not cycled")
        super().__init__(optimizer)
        self._set_momentum()

    def get_lr(self) -> list[float]:
        """The rate of each parameter group at the current iteration."""
        low, high = self.lr_range
        rate = low + (high - low) * self._share() if self._is_cycling() else low / self._decay(self.decay_lr_rate)
        return [rate] * len(self.optimizer.param_groups)

    def get_mom(self) -> float:
        """The momentum of all parameter groups at the current iteration."""
        low, high = self.momentum_range
        if self.last_epoch == 0:
            return low  # as DeepSpeed starts, though the cycle continues from the other end
        return high - (high - low) * self._share() if self._is_cycling() else high * self._decay(self.decay_mom_rate)

    def step(self, batch_iteration: int | None = None) -> None:
        """Sets the rates, and the momenta, of the next iteration, or of the given one."""
        super().step(batch_iteration)
        self._set_momentum()

    def _set_momentum(self) -> None:
        if self.cycles_momentum:
            for group in self.optimizer.param_groups:
                group["betas"] = (self.get_mom(), CYCLED_BETA2)

    def _is_cycling(self) -> bool:
        return self.last_epoch - 1 < sum(self.sizes)

    def _share(self) -> float:
        """Fraction of the way of the rate from its minimum to its maximum."""
        (first, second), place = self.sizes, self.last_epoch % sum(self.sizes)
        is_first = place <= first
        numerator, size = (place, first) if is_first else (first + second - place, second)
        stairs = self.stairs[0 if is_first else 1]
        return numerator * stairs // size / stairs if stairs > 0 else numerator / size

    def _decay(self, rate: float) -> float:
        if self.decay_step_size == 0:
            return 1.0
        return 1 + rate * (self.last_epoch - sum(self.sizes)) / self.decay_step_size


def warmup_fraction(iteration: int, warmup_num_steps: int, warmup_type: str) -> float:
    """Progress of the warmup at `iteration`, from 0 (the floor) to 1 (the peak)."""
    if iteration < 0:
        return 0.0
    if warmup_type == "log":
        return math.log(iteration + 1) / math.log(warmup_num_steps)
    return iteration / warmup_num_steps


class _WarmupSchedule(IterationSchedule):
    """Base class of the three warmup schedules: checks and computes the warmup."""

    def __init__(self, optimizer: torch.optim.Optimizer, warmup_num_steps: int, warmup_type: str):
        check_number("warmup_num_steps", warmup_num_steps, 0)
        check_integer("warmup_num_steps", whole_number(warmup_num_steps), 0)
        if warmup_type not in ("log", "linear"):
            raise ValueError(f'{warmup_type=} must be "log" or "linear"; "log" is the default')
        # DeepSpeed's lower bound of 2; with 1 the logarithm in the denominator would be 0.
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
        warmup_max_lr: the peak, in the same form; None takes each parameter group's own `lr`.
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

    At iteration i >= W the rate is at max(0, (S - i) / max(1, S - W)) between floor and peak.

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
    """From a fraction of each group's own `lr` up to that `lr`, then down half a cosine to another fraction of it.

    At iteration i >= W the rate is lr * (c + (1 - c) * (1 + cos(pi * p)) / 2) with c = cos_min_ratio and
    p = min(1, (i - W + 1) / max(1, S - W)). At iteration -1, the first optimizer step, it is 0.

    Args:
        optimizer: its groups' `lr` at construction is the peak.
        total_num_steps: S, the optimizer steps of the whole run.
        warmup_min_ratio: the fraction of the peak at iteration 0.
        warmup_num_steps: iterations of warmup.
        cos_min_ratio: the fraction of the peak at the end.
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
"""DeepSpeed's name of that list; accelerate uses it to recognize its schedules."""


def build_scheduler(config: SchedulerConfig, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The schedule that the `scheduler` block of the config describes, over `optimizer`."""
    cls = SCHEDULES[config.type] if config.type in SCHEDULES else getattr(torch.optim.lr_scheduler, config.type)
    schedule: LRScheduler = cls(optimizer, **config.params)
    return schedule


def check_rates(config: SchedulerConfig, num_groups: int) -> None:
    """Raises ValueError for a list of rates in the `scheduler` block without one rate per parameter group."""
    for name in PER_GROUP:
        value = config.params.get(name)
        if isinstance(value, (list, tuple)):
            per_group(f"scheduler.params.{name}", value, num_groups)


def _warn_if_short(total_num_steps: int, warmup_num_steps: int) -> None:
    if total_num_steps < warmup_num_steps:
        say_once(f"{total_num_steps=} is below {warmup_num_steps=}: the learning rate never decays")
