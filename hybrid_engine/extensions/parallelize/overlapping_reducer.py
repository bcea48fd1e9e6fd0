"""Adds up gradients over units while the backward pass that makes them goes on."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn

from hybrid_engine.extensions.parallelize.reducer import Reducer


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
        self._error: Exception | None = None  # of this step, raised at its end at the latest; nothing begins after it
        self._is_lost = False
        note = weakref.WeakMethod(self._note)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: None if note() is None else note()(p))  # type: ignore[misc]

    @property
    def may_fail(self) -> bool:
        """Whether there may be an error on this process alone, as where somebody changes a gradient that is summed."""
        return True

    def check(self) -> None:
        """RuntimeError where an earlier step failed here, and not on all processes; local."""
        if self._is_lost:
            raise RuntimeError("an error in an earlier train_step has parted the units; start all processes again")

    @contextmanager
    def overlapping(
        self, num_passes: int, fails_on_all: bool, times: Mapping[int, int] | None = None
    ) -> Iterator[None]:
        """Around the `num_passes` backward passes of a step, whose gradients are added up in the last one.

        `times` says, by the identity of a parameter, how often each pass adds to its gradient where that is not once.
        `fails_on_all`: an error inside is raised on all processes of the group, so that all can go on after it. Where
        it is not, those that wait for this process wait until it ends, and it must not go on.
        """
        self.drop()
        times, self._error = times or {}, None
        self._passes_left = {id(p): num_passes * times.get(id(p), 1) for p in self.parameters}
        try:
            yield
            self._begin_rest()
            if self._error is not None:
                raise self._error
        except BaseException:
            self._is_lost = not fails_on_all and self.group is not None
            if fails_on_all:
                self._begin_rest(runs_hooks=False)
                self.drop()
            raise
        finally:
            self._passes_left = {}

    def reduce(self) -> None:
        """Sums the gradients in place, as every reducer; waits for those sums that have begun.

        A ValueError is kept where somebody has changed a gradient since.
        """
        self._begin_rest()
        for begun in self.sums:
            if begun.is_begun:
                self.keep_error(begun.check_unchanged)
        super().reduce()
        self._num_begun = 0

    def drop(self) -> None:
        """Waits for the sums that have begun, and leaves the gradients as they are."""
        super().drop()
        for begun in self.sums[: self._num_begun]:
            begun.drop()
        self._num_begun = 0

    def _note(self, parameter: nn.Parameter) -> None:
        """After a backward pass has added to the gradient of `parameter`.

        Within a step nothing is raised here but what keeps a sum from beginning, as too little memory: passes of
        several stages go on to their end together.
        """
        if self._place_of[id(parameter)] < self._num_begun:
            error = ValueError(
                "use_async_reducer=True: a backward pass adds to a gradient that is being summed over units since the "
                "last pass of train_step, in which a reentrant checkpoint may add to it twice; leave use_async_reducer "
                "out, or step before it"
            )
            if not self._passes_left:
                raise error
            self._error = self._error or error
        elif id(parameter) in self._passes_left:
            self._passes_left[id(parameter)] -= 1
            try:
                while self._num_begun < len(self.sums) and self._is_complete(self.sums[self._num_begun].parameters):
                    self._begin_next()
            except Exception as error:
                self._error = error
                raise

    def _is_complete(self, parameters: Sequence[Tensor]) -> bool:
        return self._error is None and all(self._passes_left[id(parameter)] == 0 for parameter in parameters)

    def _begin_next(self, runs_hooks: bool = True) -> None:
        if self.is_seen:
            self.sums[self._num_begun].begin(self, runs_hooks)
        self._num_begun += 1

    def _begin_rest(self, runs_hooks: bool = True) -> None:
        while self._num_begun < len(self.sums):
            self._begin_next(runs_hooks)
