"""Forward passes at stage 3, which end on all processes alike.

Each layer is gathered by all processes together. One whose pass ends in an error takes part in what the others still
gather, so that none waits for it, and a verdict at the end tells all of them.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import torch
from torch.distributed.fsdp import FSDPModule

from hybrid_engine.distributed.verdict import attempt, everyone
from hybrid_engine.zero.unwrapping import EngineHook

Result = TypeVar("Result")


class GatheringOrder:
    """What this process knows of the order in which forward passes gather the parts of one sharded module."""

    def __init__(self, modules: Iterable[FSDPModule]) -> None:
        """Notes the passes of `modules`, the outermost first, in the same order on every process."""
        self._modules = list(modules)
        self._passed: list[int] = []
        self._expected = list(range(len(self._modules)))
        """What the last whole pass came through; before the first, each module once."""
        self._hooks = [
            module.register_forward_pre_hook(EngineHook(partial(self._note, number)))
            for number, module in enumerate(self._modules)
        ]

    def _note(self, number: int, *unused: object) -> None:
        """After FSDP2 has gathered a module for its forward pass; not where a backward pass computes it anew."""
        if not _is_in_backward():
            self._passed.append(number)

    def begin(self) -> None:
        """Before a pass."""
        self._passed = []

    def complete(self) -> None:
        """After a whole pass."""
        self._expected, self._passed = self._passed, []

    def gather_rest(self) -> None:
        """Takes part in the gathering of what a pass did not come to here; layers are freed at once. Collective."""
        for number in self._expected[len(self._passed) :]:
            self._modules[number].unshard()
            if number > 0:  # the outermost may stay whole until the backward pass
                self._modules[number].reshard()

    def remove(self) -> None:
        """Notes no pass any more."""
        for hook in self._hooks:
            hook.remove()


class JointForward:
    """Forward passes of one sharded module, of which each process hears how they ended on the others."""

    def __init__(self, modules: Iterable[FSDPModule]) -> None:
        """`modules` as `GatheringOrder` takes them."""
        self._order = GatheringOrder(modules)

    def run(self, forward: Callable[[], Result]) -> Result:
        """The result of `forward`, a pass of the outermost module; collective, but for one inside a backward pass.

        Raises:
            BaseException: the error of this process, or that of another one.
        """
        if _is_in_backward():
            return forward()
        self._order.begin()
        result, error = attempt(forward)
        if error is None:
            self._order.complete()
        else:
            attempt(self._order.gather_rest)
        everyone().raise_together(error)
        return result  # type: ignore[return-value]


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
