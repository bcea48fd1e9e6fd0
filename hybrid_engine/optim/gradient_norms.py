"""How large the gradients of the masters are, over all processes whose shards together are one model."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybrid_engine.distributed.host_groups import host_group
from hybrid_engine.distributed.processes import default_device
from hybrid_engine.zero.sharding import local_tensor
from hybrid_engine.zero.split_module import num_copies
from hybrid_engine.zero.trained_parameter import TrainedParameter


class GradientNorms:
    """Measures the gradients of `parameters`, of which stages of a pipeline have others."""

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
        if max(self._copies.values()) > 1:  # each process of a unit adds its share of what several of them have
            squares = [square / self._copies_in(part, square) for part, square in zip(parts, squares, strict=True)]
        count = squares[0].new_full((), sum(map(len, gradients)))
        sums = self._added_up(torch.stack([*(square.sum() for square in squares), count]))
        sums[:-1].sqrt_()
        *totals, num_gradients = sums.tolist()  # a synchronisation with the device
        return totals, round(num_gradients)

    def count_holders(self, holders: Mapping[str, int]) -> None:
        """Says of parameters, by name, in how many stages of a pipeline each stands."""
        self._copies = {name: copies * holders.get(name, 1) for name, copies in self._copies.items()}

    def names_of_non_finite(self) -> list[str]:
        """The parameters with a gradient that is not finite on some process; collective."""
        found: list[Any] = [[t.name for t in self._parameters if _has_non_finite(t.master)]]
        if self._group is not None:
            found *= dist.get_world_size(self._group)
            dist.all_gather_object(found, found[0], group=host_group(self._group))
        return list(dict.fromkeys(name for names in found for name in names))

    def _copies_in(self, part: list[TrainedParameter], squares: torch.Tensor) -> torch.Tensor:
        """How many processes have what each of the gradients of a part is of."""
        copies = [self._copies[t.name] for t in part if t.master.grad is not None]
        return torch.tensor(copies or [1], device=squares.device)

    def _added_up(self, values: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            return values
        # What is offloaded is on the CPU, which nccl does not reach: the processes meet on the device.
        values = values.to(default_device().type)
        dist.all_reduce(values, group=self._group)
        return values


def local_gradients(part: list[TrainedParameter]) -> list[torch.Tensor]:
    """What this process holds of the gradients of the masters, of those that have one."""
    return [local_tensor(t.master.grad) for t in part if t.master.grad is not None]


def _has_non_finite(master: nn.Parameter) -> bool:
    return master.grad is not None and not bool(local_tensor(master.grad).isfinite().all())
