"""How large the gradients of the masters are, over all processes whose shards together are one model."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybrid_engine.zero.sharding import local_tensor
from hybrid_engine.zero.split_module import num_copies
from hybrid_engine.zero.trained_parameter import TrainedParameter


class GradientNorms:
    """Measures the gradients of `parameters`, which are the same in the same order on every process."""

    def __init__(self, parameters: list[TrainedParameter], group: dist.ProcessGroup | None) -> None:
        """`group`: the processes whose shards together are the model; None when this process has all of it."""
        self._parameters, self._group = parameters, group
        self._copies = {t.name: num_copies(t.master) for t in parameters}

    def measure(self, parts: list[list[TrainedParameter]]) -> tuple[list[float], int]:
        """Each part's 2-norm, still multiplied by the loss scale, and how many gradients there are; collective."""
        if not self._parameters:
            return [0.0], 0
        none = [torch.zeros((), device=local_tensor(self._parameters[0].master).device)]
        gradients = [local_gradients(part) for part in parts]
        norms = [torch._foreach_norm(grads, 2, torch.float32) if grads else none for grads in gradients]
        squares = [torch.stack(list(norm)).float().square() for norm in norms]
        if max(self._copies.values()) > 1:  # each process of a unit adds its share of what all of them have
            squares = [square / self._copies_in(part, square) for part, square in zip(parts, squares, strict=True)]
        count = squares[0].new_full((), sum(map(len, gradients)))
        sums = self._added_up(torch.stack([*(square.sum() for square in squares), count]))
        sums[:-1].sqrt_()
        *totals, num_gradients = sums.tolist()  # a synchronisation with the device
        return totals, round(num_gradients)

    def names_of_non_finite(self) -> list[str]:
        """The parameters with a gradient that is not finite on some process; collective."""
        flags = self._added_up(torch.stack([_has_non_finite(t.master) for t in self._parameters]))
        return [t.name for t, flag in zip(self._parameters, flags.tolist(), strict=True) if flag > 0]

    def _copies_in(self, part: list[TrainedParameter], squares: torch.Tensor) -> torch.Tensor:
        """How many processes have what each of the gradients of a part is of."""
        copies = [self._copies[t.name] for t in part if t.master.grad is not None]
        return torch.tensor(copies or [1], device=squares.device)

    def _added_up(self, values: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            return values
        # What is offloaded is on the CPU, which nccl does not reach: the processes meet on the device.
        param: Any = self._parameters[0].param
        values = values.to(param.device_mesh.device_type)
        dist.all_reduce(values, group=self._group)
        return values


def local_gradients(part: list[TrainedParameter]) -> list[torch.Tensor]:
    """What this process holds of the gradients of the masters, of those that have one."""
    return [local_tensor(t.master.grad) for t in part if t.master.grad is not None]


def _has_non_finite(master: nn.Parameter) -> torch.Tensor:
    if master.grad is None:
        return torch.zeros((), device=local_tensor(master).device)
    return (~local_tensor(master.grad).isfinite()).any().float()
