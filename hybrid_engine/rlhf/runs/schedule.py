"""The learning rate of each optimizer step of a run: options with transformers' names, and the scheduler for them.

transformers' schedules begin their warm-up with a step at rate 0, in which nothing is learned. A run skips that step:
its first step is the schedule's second. So a warm-up of W steps reaches the peak in step W, and a run without warm-up
begins at the peak.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from hybrid_engine.optim.lr_schedules import WarmupDecayLR
from hybrid_engine.rlhf.options.shared import DEFAULT_TYPE, EARLIER_TYPE, WITHOUT_WARMUP, ScheduleOptions

MOST_WARMUP = {"sft": 50, "reward": 20, "dpo": 10, "kto": 10}
"""Optimizer steps of the longest default warm-up of a run, by recipe."""
MOST_WARMUP_OF_ROLLOUTS = 4
"""The same for recipes that learn from their own answers."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The rates of a run of `num_steps` optimizer steps, of which the first `num_warmup_steps` rise to the peak."""

    kind: str
    num_steps: int
    num_warmup_steps: int

    @classmethod
    def of(cls, config: ScheduleOptions, num_steps: int, recipe: str) -> "Schedule":
        """The schedule for the options of a run of `recipe`."""
        kind = config.lr_scheduler_type or DEFAULT_TYPE
        most_warmup = MOST_WARMUP.get(recipe, MOST_WARMUP_OF_ROLLOUTS)
        if config.warmup_steps is not None:
            num_warmup_steps = config.warmup_steps
        elif config.warmup_ratio is not None:
            num_warmup_steps = round(config.warmup_ratio * num_steps)
        elif kind == EARLIER_TYPE:
            num_warmup_steps = min(most_warmup, num_steps)
        else:
            num_warmup_steps = 0 if kind == WITHOUT_WARMUP else min(most_warmup, num_steps // 10)
        return cls(kind=kind, num_steps=num_steps, num_warmup_steps=num_warmup_steps)

    def build(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """The scheduler, for which each parameter group's `lr` is its peak."""
        if self.kind == EARLIER_TYPE:
            of_run = {"total_num_steps": self.num_steps, "warmup_num_steps": self.num_warmup_steps}
            return WarmupDecayLR(optimizer, **of_run, warmup_max_lr=None, warmup_type="linear")
        return LambdaLR(optimizer, self.shares(optimizer.param_groups[0]["lr"]))

    def shares(self, peak: float) -> Callable[[int], float]:
        """A function from an optimizer step, counted from 0, to its rate as a share of `peak`."""
        num_left_out = int(self.num_warmup_steps > 0)
        plain = torch.optim.SGD([torch.zeros(1)], lr=peak)  # transformers needs an optimizer to build its schedule
        found = get_scheduler(self.kind, plain, self.num_warmup_steps, self.num_steps + num_left_out)
        assert isinstance(found, LambdaLR), f"{self.kind=}"
        share = found.lr_lambdas[0]
        return lambda step: share(step + num_left_out)

    def describe(self) -> str:
        """The line about the schedule that is logged at the beginning of a run."""
        warmup = f", a warm-up of {self.num_warmup_steps}" if self.num_warmup_steps else ""
        short = "; the peak is not reached" if self.num_warmup_steps > self.num_steps else ""
        return f"learning rate: {self.kind} over {self.num_steps} optimizer steps{warmup}{short}"
