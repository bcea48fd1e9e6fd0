"""How far the rollout's log-probabilities are from the trainer's: measured, never assumed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class LogprobDifference:
    """Absolute difference of log-probabilities, rollout against trainer, per token."""

    mean: float
    max: float
    past_switch: "LogprobDifference | None" = None
    """The same around the length that changes rope's frequencies, where both must differ; None: none does."""


def describe_switch(difference: LogprobDifference, length: int) -> str:
    """How far rollouts that grow beyond `length` tokens must be from the trainer, in one line."""
    return (
        f"rollouts that grow beyond {length} tokens: rope's frequencies change there, in the rollout for the tokens "
        "that follow, in the trainer's forward for all of them; around that length log-probabilities are "
        f"{difference.mean:.2g} apart in the mean and {difference.max:.2g} at most"
    )


def compare_logprobs(
    rollout: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor, world_size: int = 1
) -> LogprobDifference:
    """Over the places where `mask` is True, of one shape with the others, and over `world_size` processes.

    Collective when there are several, so that all come to the same decision.
    """
    difference = (rollout.detach().float() - trainer.detach().float()).abs()[mask.bool()].double()
    total = torch.stack([difference.sum(), torch.tensor(float(difference.numel())).to(difference)])
    largest = torch.cat([difference, difference.new_zeros(1)]).max()
    if world_size > 1:
        dist.all_reduce(total)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return LogprobDifference((total[0] / total[1].clamp(min=1)).item(), largest.item())


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode inside; every submodule gets its own mode back."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, mode in modes:
            submodule.training = mode
