"""Adds up gradients over units, whose processes saw different inputs."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Hook = Callable[["Bucket", Tensor], None]


class Bucket:
    """Parameters whose gradients are summed together over one group of processes, and the hooks that see these."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None):
        self.parameters, self.group = list(parameters), group
        self.pre_hooks: list[Hook] = []
        self.post_hooks: list[Hook] = []

    def run_hooks(self, hooks: Sequence[Hook], gradients: Tensor) -> None:
        """Shows `gradients` to the hooks, which may change them in place."""
        for hook in hooks:
            hook(self, gradients)


class Reducer(Bucket):
    """The parameters whose gradients are summed after the backward pass by processes that all have the same parts."""

    @torch.no_grad()
    def reduce(self) -> None:
        """Sums the gradients in place, those of one dtype in one collective; one that a process lacks counts as 0.

        One that all lack stays away: optimizers leave such parameters as they are. Hooks get the gradients of a dtype
        as one flat tensor, before and after.
        """
        if self.group is None and not self.pre_hooks and not self.post_hooks:
            return  # nobody would see the flat copy
        for dtype in sorted({p.dtype for p in self.parameters}, key=str):
            parameters = [p for p in self.parameters if p.dtype == dtype]
            is_there = [p.grad is not None for p in parameters]
            parts = [local_gradient(p) for p in parameters]
            flags = torch.tensor(is_there, dtype=dtype, device=parts[0].device)
            flat = torch.cat([*(part.flatten() for part in parts), flags])
            gradients, counts = flat[: -len(parts)], flat[-len(parts) :]
            self.run_hooks(self.pre_hooks, gradients)
            if self.group is not None:
                dist.all_reduce(flat, group=self.group)
            self.run_hooks(self.post_hooks, gradients)
            for part, summed in zip(parts, gradients.split([part.numel() for part in parts]), strict=True):
                part.copy_(summed.view_as(part))
            for parameter, count in zip(parameters, counts.tolist(), strict=True):
                if count == 0:
                    parameter.grad = None


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of the gradient; zeros are put in its place where the backward pass made none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
