"""Gradient accumulation: decides which backward passes reduce gradients, and which calls of `step()` step.

In managed mode, the default, every `gradient_accumulation_steps`-th micro-batch ends an optimizer step, and its
backward pass reduces the sum of the gradients. In unmanaged mode every call of `step()` steps. `ZeroEngine` uses it
for its own passes, `backward_hooks.py` for those that PyTorch starts.

Also here: the counters of a step, which the parts of an engine share.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

from torch import Tensor

from hybrid_engine.distributed.verdict import ErrorNotice, attempt, everyone
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.zero.gathered_parameters import LATE
from hybrid_engine.zero.passes import Passes
from hybrid_engine.zero.split_module import together


@dataclass(kw_only=True)
class StepCounters:
    """Counters of one engine and the sizes of its step; the parts of the engine share the object."""

    num_micro_batches: int
    """Micro-batches of an optimizer step."""
    micro_batch_size: int
    """Samples of a micro-batch of one process."""
    batch_size: int
    """Samples of an optimizer step over all processes."""
    global_steps: int = 0
    """Optimizer steps, including those that overflowed."""
    global_samples: int = 0
    """Samples of those steps, over all processes."""
    skipped_steps: int = 0
    """Optimizer steps that overflowed."""
    micro_steps: int = 0
    """Micro-batches of this process."""
    num_pending_micro_batches: int = 0
    """Micro-batches since the last optimizer step."""
    loss_sum: Tensor | None = None
    """Sum of the losses since the last optimizer step; None if PyTorch started their backward passes."""

    def add_loss(self, loss: Tensor) -> None:
        """Adds to `loss_sum`, on the device: reading the number would wait for the device at every micro-batch."""
        self.loss_sum = loss.detach() if self.loss_sum is None else self.loss_sum + loss.detach()

    def check_between_steps(self) -> None:
        """Raises ValueError if micro-batches of a step are done."""
        if self.num_pending_micro_batches:
            raise ValueError(
                f"batch sizes: {self.num_pending_micro_batches} micro-batches of a step are done; change them "
                f"after the step() that ends the accumulation"
            )

    def set_sizes(self, micro_batch_size: int, num_micro_batches: int, num_units: int) -> None:
        """Changes the sizes of a step, between two steps; with the same values on all processes."""
        self.micro_batch_size, self.num_micro_batches = micro_batch_size, num_micro_batches
        self.batch_size = micro_batch_size * num_micro_batches * num_units
        self.micro_steps = self.global_steps * num_micro_batches


class GradientAccumulation:
    """The gradients of one engine between two optimizer steps."""

    def __init__(
        self, counters: StepCounters, passes: Passes, optimizer: ZeroOptimizer | None, *, is_managed: bool
    ) -> None:
        """`is_managed`: whether micro-batches are counted; otherwise every call of `step()` steps."""
        self._counters, self._passes, self._optimizer = counters, passes, optimizer
        self.is_managed = is_managed
        self.num_passes = 0
        """Number of backward passes since the last `step()`."""
        self._boundary: bool | None = None
        self._is_stepping = False
        self._block: str | None = None
        self._waits_for_end = False
        self.is_collective = False
        """Whether the gradients of the current backward pass are reduced in it or at its end."""
        self._is_alike = True

    def is_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its optimizer step; if unmanaged, whether `step()` runs."""
        if self._boundary is not None:
            return self._boundary
        if not self.is_managed:
            return self._is_stepping
        return (self._counters.micro_steps + 1) % self._counters.num_micro_batches == 0

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Sets whether each micro-batch from now on ends an optimizer step; None returns to counting them."""
        if not self.is_managed:
            raise ValueError(
                "set_gradient_accumulation_boundary(): with managed_gradient_accumulation=false every step() is the "
                "boundary; leave the call out, or the option"
            )
        self._boundary = is_boundary

    def drop(self) -> None:
        """Drops all gradients; the next micro-batch is the first of a step again."""
        self.num_passes = 0
        self._counters.micro_steps -= self._counters.num_pending_micro_batches
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drops all gradients, including those of the micro-batches since the last boundary."""
        self._passes.sharding.root.zero_grad(set_to_none=True)
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        self._passes.drop_pending_gradients()
        self._counters.num_pending_micro_batches, self._counters.loss_sum = 0, None

    def agree_to_begin(self, check: Callable[[], None]) -> None:
        """Before each backward pass; collective if its gradients are reduced.

        Raises:
            BaseException: the error of `check`, which keeps this process from starting, or of another process.
        """
        error = attempt(check)[1]
        is_last = self.is_managed and self.is_boundary()
        self.is_collective = self._block is None and (self._passes.sharding.reduces_every_pass or is_last)
        if self.is_collective:
            self._is_alike = self._passes.came_alike(error)
        elif error is not None:
            raise error

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Wraps a whole backward pass, after `agree_to_begin`; at its end all processes learn about an error on one."""
        self.begin_pass()
        with self._passes.ending_on_error(), self.agreeing():
            yield
        self.end_pass()

    def reduce_at_end(self) -> None:
        """After a backward pass whose layers differed between processes: reduces the gradients that it left."""
        if self._waits_for_end:
            self.reduce()

    def begin_pass(self) -> None:
        """Sets whether the pass reduces the gradients.

        Raises:
            ValueError: the processes used different layers, at stage 3; raised on all.
        """
        if self.is_collective:
            self._passes.check_layers(self._is_alike)
        self._waits_for_end = self.is_collective and not self._is_alike
        self._passes.expect_gradients(self._reduces)

    @property
    def _reduces(self) -> bool:
        return self.is_collective and self._is_alike

    def agreeing(self) -> AbstractContextManager[None]:
        """Wraps a backward pass, or the rest of it; at its end all processes learn about an error on one."""
        return self._passes.agreeing(self._reduces) if self.is_collective else nullcontext()

    def leave_pass(self, problem: ErrorNotice) -> None:
        """Called after a backward pass that ended with an error, which this process has raised already."""
        with suppress(RuntimeError), together(self._passes.sharding.root):
            raise RuntimeError(problem.text)
        if self.is_collective:
            self._passes.leave(problem, self._reduces)

    def end_pass(self) -> None:
        """Counts a complete backward pass."""
        self.num_passes += 1

    def check_step(self) -> None:
        """Raises ValueError if `step()` cannot run: inside a block without reduction, or without a backward pass."""
        if self._block is not None:
            raise ValueError(f"step(): inside {self._block} gradients are not reduced; step after it")
        if self.num_passes == 0:
            raise ValueError("step(): there are no gradients; call backward(loss) before each step()")

    @contextmanager
    def step(self, error: BaseException | None = None) -> Iterator[bool]:
        """Wraps `step()`; yields whether it steps the optimizer, and reduces waiting gradients if so. Collective.

        Raises:
            BaseException: `error`, which keeps this process from stepping, unless the block tells the other processes
                about it; if the processes reduce here, also the error of another one.
        """
        self._is_stepping = True
        try:
            is_boundary = self.is_boundary()
            self._begin_step(is_boundary, error)
            try:
                yield is_boundary
            finally:
                self.num_passes = 0
        finally:
            self._is_stepping = False

    @contextmanager
    def stepping_together(self, error: BaseException | None) -> Iterator[None]:
        """Wraps the optimizer's step, for which parameters are shards. Collective.

        Raises:
            BaseException: `error`, or another one before anything was stepped, of this process or of another; all
                gradients are dropped.
        """
        assert self._optimizer is not None
        parameters, sharding = self._optimizer.parameters, self._passes.sharding
        is_held, error_now = attempt(self._prepare_step)
        error = self._passes.drop_unused_gradients(parameters, error_now if error is None else error)
        if error is not None:
            self._abandon_step()
            raise error
        try:
            yield
        except ValueError:  # a refusal, which every process raises
            self._abandon_step()
            raise
        sharding.settle_stepped(bool(is_held), {id(trained.param) for trained in parameters})

    def _prepare_step(self) -> bool:
        """All parts of a step that may fail and change nothing yet; local. Returns the argument of `settle_stepped`."""
        assert self._optimizer is not None
        self.check_reduced()
        is_held = self._passes.sharding.become_shards_to_step(len(self._optimizer.parameters))
        self._optimizer.take_gradients()
        return is_held

    def _abandon_step(self) -> None:
        self.drop()
        self._passes.sharding.settle()

    def num_samples(self) -> int:
        """Samples of the current optimizer step, over all processes."""
        if self.is_managed:
            return self._counters.batch_size
        return self.num_passes * self._counters.micro_batch_size * self._passes.sharding.num_units

    def _begin_step(self, is_boundary: bool, error: BaseException | None) -> None:
        if is_boundary and self._passes.has_unreduced:
            everyone().raise_together(error)
            self.reduce()
        elif error is not None and not (is_boundary and self._passes.has_partners):
            raise error

    def check_pass(self) -> None:
        """Raises ValueError if the backward pass left gradients unreduced: a layer's parameter was used before it."""
        if self._reduces:
            self.check_reduced()

    def check_reduced(self) -> None:
        """Raises ValueError if the optimizer cannot step: a parameter of a layer was used before it."""
        if self._passes.has_late_gradients():
            raise ValueError(LATE)

    def reduce(self) -> None:
        """Reduces the gradients that earlier backward passes left unreduced; collective."""
        assert self._optimizer is not None
        self._passes.reduce_gradients()
        self._optimizer.accumulate_gradients()
        self._waits_for_end = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside do not reduce; the next one that ends a step, or `step()`, reduces their sum.

        Raises:
            ValueError: at stages 2 and 3, which reduce at every micro-batch; inside another block without reduction.
        """
        if self._passes.sharding.reduces_every_pass:
            raise ValueError(
                f"no_sync(): zero_optimization.stage={self._passes.sharding.stage} keeps only shards of the gradients "
                f"and reduces them at every micro-batch; use stage 0 or 1, or coalesce_grad_reduction(), or leave "
                f"no_sync() out"
            )
        with self._inside("no_sync()"):
            yield

    @contextmanager
    def coalesce(self) -> Iterator[None]:
        """Backward passes inside do not reduce; the sum of gradients is reduced once, at the end. Collective.

        Raises:
            ValueError: inside another block without reduction; with `managed_gradient_accumulation=false`.
        """
        if not self.is_managed:
            raise ValueError(
                "coalesce_grad_reduction(): with managed_gradient_accumulation=false step() reduces; leave one of them "
                "out"
            )
        with self._inside("coalesce_grad_reduction()"):
            yield
        if self._passes.has_unreduced:
            self.reduce()

    @contextmanager
    def _inside(self, block: str) -> Iterator[None]:
        if self._block is not None:
            raise ValueError(f"{block}: inside {self._block} already; leave one of them out")
        self._block = block
        try:
            yield
        finally:
            self._block = None
