"""The engine's config of a trained role, from a recipe's options: batch sizes, precision and schedule.

Trained weights have fp32 masters; losses, log-probabilities, advantages and the optimizer's state are fp32 too.

transformers' schedules begin their warm-up with a step at rate 0, in which nothing is learned. A run skips that step:
its first step is the schedule's second. So a warm-up of W steps reaches the peak in step W, and a run without warm-up
begins at the peak.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from hybrid_engine.config.checks import torch_dtype_of
from hybrid_engine.optim.lr_schedules import WarmupDecayLR
from hybrid_engine.rlhf.options.shared import (
    AUTO,
    DEFAULT_TYPE,
    EARLIER_TYPE,
    WITHOUT_WARMUP,
    DtypeOptions,
    ScheduleOptions,
    largest_divisor,
)

ADAM_EPS = 1e-5
"""PyTorch's 1e-8 takes aggressive first steps for small gradients (Huang et al., "N implementation details")."""
FIRST_LOSS_SCALE_POWER = 12
"""For fp16: DeepSpeed's 16 overflows the gradients of a language model, whose first steps would be skipped."""
MOST_WARMUP = {"sft": 50, "reward": 20, "dpo": 10, "kto": 10}
"""Optimizer steps of the longest default warm-up of a run, by recipe."""
MOST_WARMUP_OF_ROLLOUTS = 4
"""The same for recipes that learn from their own answers."""


def build_engine_config(
    *,
    batch_size: int,
    micro_batch_size: int,
    learning_rate: float,
    zero_stage: int,
    dtype: str,
    weight_decay: float = 0.0,
    max_out_tokens: int | None = None,
    exact: bool = False,
    max_running: int = 0,
) -> dict[str, Any]:
    """A config for `hybrid_engine.initialize`: AdamW, gradients clipped to norm 1.

    Args:
        batch_size: samples of an optimizer step over all processes.
        micro_batch_size: samples of a forward pass on one process.
        learning_rate: the peak of the schedule.
        zero_stage: 0 to 3.
        dtype: in which the role computes, a value of `--dtype`.
        weight_decay: decoupled.
        max_out_tokens: prompt and response tokens of the longest sequence that the role generates; None for a role that
            does not generate.
        exact: whether a role that generates also trains in exact mode (docs/exact.md).
        max_running: sequences that such a role decodes at once; 0 uses the engine's default.
    """
    config: dict[str, Any] = dtype_blocks(dtype) | {
        "train_batch_size": batch_size,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "zero_optimization": {"stage": zero_stage},
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": learning_rate, "betas": [0.9, 0.95], "eps": ADAM_EPS, "weight_decay": weight_decay},
        },
    }
    if max_out_tokens is not None:
        # The recipe logs the times itself, in the line of their step.
        block = {"enabled": True, "max_out_tokens": max_out_tokens, "print_latency": False, "exact": exact}
        config["hybrid_engine"] = block | {"max_running": max_running}
    return config


def largest_micro_batch(per_process: int, limit: int) -> int:
    """Samples of a forward pass, at most `limit`: every optimizer step must have the same number of equal passes.

    Args:
        per_process: samples of an optimizer step on one process.
        limit: the most that fits into memory.
    """
    return largest_divisor(per_process, limit)


def choose_dtype(dtype: str, device_type: str | None = None) -> str:
    """`dtype` with auto resolved, for devices of a type; None: those of this machine."""
    if dtype != AUTO:
        return dtype
    is_gpu = torch.cuda.is_available() if device_type is None else device_type == "cuda"
    return "bf16" if is_gpu else "fp32"


def torch_dtype(dtype: str, device_type: str | None = None) -> torch.dtype:
    """`choose_dtype` as a torch dtype."""
    return torch_dtype_of(choose_dtype(dtype, device_type))


def gradient_figures(engine: Any, prefix: str = "") -> dict[str, Any]:
    """The gradient norm of an engine's last optimizer step, with `prefix` before its name, and fp16's figures."""
    return {f"{prefix}grad_norm": engine.get_global_grad_norm(), **scaling_figures(engine, prefix)}


def scaling_figures(engine: Any, prefix: str = "") -> dict[str, Any]:
    """In fp16 the next loss scale and the number of steps skipped so far, whose gradients were not finite; else empty.

    The norm of such a step's gradients is not finite either.
    """
    if not engine.config.fp16.enabled:
        return {}
    return {f"{prefix}loss_scale": engine.optimizer.cur_scale, f"{prefix}skipped_steps": engine.skipped_steps}


def apply_tf32(options: DtypeOptions) -> None:
    """Sets whether fp32 products on a GPU may use TF32 in this process.

    Raises:
        ValueError: TF32 is requested, and there is no GPU.
    """
    if options.tf32 and not torch.cuda.is_available():
        raise ValueError("--tf32 applies to matrix products on a GPU, and no GPU is available; leave it out")
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    torch.backends.cudnn.allow_tf32 = options.tf32


def dtype_blocks(dtype: str) -> dict[str, Any]:
    """The blocks of an engine's config for `dtype`."""
    found = choose_dtype(dtype)
    blocks = {"bf16": {"enabled": True}, "fp16": {"enabled": True, "initial_scale_power": FIRST_LOSS_SCALE_POWER}}
    return {found: blocks[found]} if found in blocks else {}


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
