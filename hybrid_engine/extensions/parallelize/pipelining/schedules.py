"""The schedules of pipelines by nnScaler's names, those that PyTorch runs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

SINGLE: Mapping[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "infer_pipe": ScheduleGPipe}
"""One stage a process."""
SCHEDULES = (*SINGLE, "1f1b_interleaved")
REFUSED = {"1f1b_plus": "1f1b", "chimera_direct": "1f1b_interleaved"}
"""What PyTorch does not have, and what to take instead."""


def check_name(name: Any) -> None:
    """ValueError for a schedule that there is not."""
    if isinstance(name, str) and name in REFUSED:
        raise ValueError(f"pipeline_scheduler={name!r} is not one of PyTorch's; take {REFUSED[name]!r}")
    if name not in SCHEDULES:
        raise ValueError(f"pipeline_scheduler={name!r} must be one of {list(SCHEDULES)}")


def check_schedule(name: str, num_stages: int, num_micro_batches: int) -> None:
    """ValueError for a schedule that there is not, and for numbers that it does not take."""
    check_name(name)
    if name == "1f1b" and num_micro_batches < num_stages:
        raise ValueError(
            f"pipeline_nmicros={num_micro_batches} must be at least the number of stages, {num_stages}, for '1f1b'; "
            "take 'gpipe' for fewer"
        )
    if name == "1f1b_interleaved" and (num_stages % 2 or num_stages < 4):
        raise ValueError(
            f"pipeline_nstages={num_stages} must be two for each of at least two processes for '1f1b_interleaved'"
        )
    rounds = max(1, num_micro_batches // max(num_stages // 2, 1))
    if name == "1f1b_interleaved" and num_micro_batches % rounds:
        raise ValueError(
            f"pipeline_nmicros={num_micro_batches} must be a multiple of {num_stages // 2}, the number of processes, "
            "or less, for '1f1b_interleaved'"
        )


def stages_each(name: str) -> int:
    """The stages of one process."""
    return 2 if name == "1f1b_interleaved" else 1


def build_schedule(
    name: str, stages: Sequence[PipelineStage], num_micro_batches: int, loss_fn: Callable[..., Any] | None
) -> Any:
    """A schedule that sums gradients over micro-batches; without `loss_fn` it has no backward pass."""
    if name == "1f1b_interleaved":
        return ScheduleInterleaved1F1B(list(stages), num_micro_batches, loss_fn=loss_fn, scale_grads=False)
    kind = ScheduleGPipe if loss_fn is None else SINGLE[name]
    return kind(stages[0], num_micro_batches, loss_fn=loss_fn, scale_grads=False)
