"""Adds up gradients over units, whose processes saw different inputs."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Hook = Callable[["Reducer", Tensor], None]


class Reducer:
    """The parameters whose gradients are summed over one group of processes, which all have the same parts."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None):
        self.parameters, self.group = list(parameters), group
        self.pre_hooks: list[Hook] = []
        self.post_hooks: list[Hook] = []

    @torch.no_grad()
    def reduce(self) -> None:
        """Sums the gradients in place, those of one dtype in one collective; one that a process lacks counts as 0.

        Hooks get the gradients of a dtype as one flat tensor, before and after.
        """
        for dtype in sorted({p.dtype for p in self.parameters}, key=str):
            parts = [local_gradient(p) for p in self.parameters if p.dtype == dtype]
            if self.group is None and not self.pre_hooks and not self.post_hooks:
                continue  # nobody would see the flat copy
            flat = torch.cat([part.flatten() for part in parts]) if parts else torch.empty(0)
            for hook in self.pre_hooks:
                hook(self, flat)
            if self.group is not None:
                dist.all_reduce(flat, group=self.group)
            for hook in self.post_hooks:
                hook(self, flat)
            for part, summed in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(summed.view_as(part))


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of the gradient; zeros are put in its place where the backward pass made none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
