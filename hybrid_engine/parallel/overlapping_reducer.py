"""Adds up gradients over units while the backward pass that makes them goes on."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn

from hybrid_engine.parallel.reducer import Reducer


class OverlappingReducer(Reducer):
    """A reducer that begins to sum a bucket as soon as the last backward pass of a step has made its gradients.

    Buckets begin in the same order on all processes, whatever order their gradients come in; what a process has no
    gradient of by the end of the step begins then. Hooks before a sum run inside of the backward pass.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, bucket_bytes: float):
        super().__init__(parameters, group, bucket_bytes)
        self._num_begun = 0  # of the buckets, whose sums nobody has taken yet
        self._passes_left: dict[int, int] = {}  # inside of a step, by the identity of a parameter
        self._place_of = {id(p): place for place, one in enumerate(self.sums) for p in one.parameters}
        self._is_lost = False
        note = weakref.WeakMethod(self._note)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: None if note() is None else note()(p))  # type: ignore[misc]

    def check(self) -> None:
        """RuntimeError where an earlier step failed here, and not on all processes; local."""
        if self._is_lost:
            raise RuntimeError("an error in an earlier train_step has parted the units; start all processes again")

    @contextmanager
    def overlapping(self, num_passes: int, fails_on_all: bool) -> Iterator[None]:
        """Around the `num_passes` backward passes of a step, whose gradients are added up in the last one.

        `fails_on_all`: an error inside is raised on all processes of the group, so that all can go on after it. Where
        it is not, those that wait for this process wait until it ends, and it must not go on.
        """
        self.drop()
        self._passes_left = {id(parameter): num_passes for parameter in self.parameters}
        try:
            yield
        except BaseException:
            self._is_lost = not fails_on_all and self.group is not None
            if fails_on_all:
                self._begin_rest()
                self.drop()
            raise
        finally:
            self._passes_left = {}
        self._begin_rest()

    def reduce(self) -> None:
        """Sums the gradients in place, as every reducer; waits for those sums that have begun."""
        self._begin_rest()
        super().reduce()
        self._num_begun = 0

    def drop(self) -> None:
        """Waits for the sums that have begun, and leaves the gradients as they are."""
        for begun in self.sums[: self._num_begun]:
            begun.drop()
        self._num_begun = 0

    def _note(self, parameter: nn.Parameter) -> None:
        """After a backward pass has added to the gradient of `parameter`."""
        if self._place_of[id(parameter)] < self._num_begun:
            raise ValueError(
                "use_async_reducer=True: a backward pass adds to a gradient that is being summed over units since the "
                "last pass of train_step; leave use_async_reducer out, or step before it"
            )
        if id(parameter) in self._passes_left:
            self._passes_left[id(parameter)] -= 1
            while self._num_begun < len(self.sums) and self._is_complete(self.sums[self._num_begun].parameters):
                self._begin_next()

    def _is_complete(self, parameters: Sequence[Tensor]) -> bool:
        return all(self._passes_left[id(parameter)] == 0 for parameter in parameters)

    def _begin_next(self) -> None:
        if self.is_seen:
            self.sums[self._num_begun].begin(self)
        self._num_begun += 1

    def _begin_rest(self) -> None:
        while self._num_begun < len(self.sums):
            self._begin_next()
