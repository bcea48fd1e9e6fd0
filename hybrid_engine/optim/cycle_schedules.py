"""DeepSpeed's schedules for finding and cycling a learning rate, LRRangeTest and OneCycle, as PyTorch schedulers.

Iterations are counted like in `lr_schedules.py`: construction is iteration -1 and the k-th `step()` is iteration
k - 1, unless it is given another. Source of both: Smith (2018), "A disciplined approach to neural network
hyper-parameters"; the formulas are DeepSpeed's, `runtime/lr_schedules.py`.
"""

import math
from collections.abc import Sequence

import torch

from hybrid_engine.config.checks import check_number
from hybrid_engine.config.notices import say_once
from hybrid_engine.optim.iteration_schedule import IterationSchedule, check_last_batch_iteration, per_group

# DeepSpeed's, whatever the optimizer had: while the momentum is cycled, beta2 stands still here.
CYCLED_BETA2 = 0.99


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
        """Sets the rates of the next iteration, or of the one given."""
        super().step(batch_iteration)

    def get_lr(self) -> list[float]:
        """The rate of each parameter group at the current iteration."""
        interval = self.last_epoch / self.step_size
        growth = 1 + self.step_rate * (math.floor(interval) if self.is_staircase else interval)
        return [rate * growth for rate in self.min_lrs]


class OneCycle(IterationSchedule):
    """A rate that climbs and falls once and then decays, with a momentum (beta1) that falls and climbs against it.

    With F and S the sizes of the two halves, iteration i < F + S stands at x = i + 1 of the cycle: x / F of the way
    from `cycle_min_lr` to `cycle_max_lr` up to x = F, then (F + S - x) / S. Stairs round that share down. Later, with
    n = (i - F - S + 1) / decay_step_size, the rate is cycle_min_lr / (1 + decay_lr_rate n) and the momentum
    cycle_max_mom (1 + decay_mom_rate n); without decay they stand still.

    Args:
        optimizer: its groups' `lr` is set, and `betas`, if it has any and `cycle_momentum`.
        cycle_first_step_size: F, iterations.
        cycle_second_step_size: S; None takes F.
        cycle_first_stair_count: stairs of the first half; 0 is continuous.
        cycle_second_stair_count: stairs of the second half; None takes those of the first.
        decay_step_size: iterations of one unit of decay; 0 decays nothing.
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
            return low  # DeepSpeed's beginning, though the cycle continues from the other end
        return high - (high - low) * self._share() if self._is_cycling() else high * self._decay(self.decay_mom_rate)

    def step(self, batch_iteration: int | None = None) -> None:
        """Sets the rates, and the momenta, of the next iteration, or of the one given."""
        super().step(batch_iteration)
        self._set_momentum()

    def _set_momentum(self) -> None:
        if self.cycles_momentum:
            for group in self.optimizer.param_groups:
                group["betas"] = (self.get_mom(), CYCLED_BETA2)

    def _is_cycling(self) -> bool:
        return self.last_epoch - 1 < sum(self.sizes)

    def _share(self) -> float:
        """How far the rate has come from its minimum to its maximum."""
        (first, second), place = self.sizes, self.last_epoch % sum(self.sizes)
        is_first = place <= first
        numerator, size = (place, first) if is_first else (first + second - place, second)
        stairs = self.stairs[0 if is_first else 1]
        return numerator * stairs // size / stairs if stairs > 0 else numerator / size

    def _decay(self, rate: float) -> float:
        if self.decay_step_size == 0:
            return 1.0
        return 1 + rate * (self.last_epoch - sum(self.sizes)) / self.decay_step_size
