"""Mean and deviation over the tokens, or the samples, of all processes.

Everything here is a target: nothing carries a gradient. Sums are taken in float64. With a process group they run over
all of its processes, and each of them must make the call; with None they cover this process alone.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

WHITEN_EPS = 1e-8


class Moments(NamedTuple):
    """The moments that the statistics below are computed from, each 0-dimensional and float64."""

    count: torch.Tensor
    mean: torch.Tensor
    """nan without an entry"""
    squares: torch.Tensor
    """sum of the squared distances from the mean"""


@torch.no_grad()
def moments(values: torch.Tensor, mask: torch.Tensor, group: dist.ProcessGroup | None = None) -> Moments:
    """The moments of `values` where `mask` (bool, of the same shape) is True, over the processes of `group`."""
    assert mask.dtype == torch.bool and mask.shape == values.shape, f"{mask.dtype=} {mask.shape=} {values.shape=}"
    exact = torch.where(mask, values, 0.0).double()
    count, total = sum_over_processes(torch.stack([mask.sum().double(), exact.sum()]), group)
    mean = total / count
    centred = torch.where(mask, exact - mean, 0.0)
    return Moments(count, mean, sum_over_processes(centred.square().sum(), group))


def deviation(found: Moments) -> torch.Tensor:
    """The standard deviation with the divisor n - 1; 0 for a single entry."""
    return (found.squares / (found.count - 1).clamp(min=1)).sqrt()


def whitening_deviation(found: Moments) -> torch.Tensor:
    """sqrt(variance + 1e-8), the variance with the divisor n - 1. Source: verl, `torch_functional.py`."""
    return (found.squares / (found.count - 1).clamp(min=1) + WHITEN_EPS).sqrt()


def whitening_deviation_biased(found: Moments) -> torch.Tensor:
    """sqrt(max(variance, 1e-8)), the variance with the divisor n. Source: OpenRLHF, `experience_maker.py`."""
    return (found.squares / found.count.clamp(min=1)).clamp(min=WHITEN_EPS).sqrt()


def sum_over_processes(local: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sums `local` in place over the processes of `group`, unless that is None, and returns it."""
    if group is not None:
        dist.all_reduce(local, group=group)
    return local
