"""Gradient accumulation: decides which backward passes reduce gradients, and which calls of `step()` step.

In managed mode, the default, every `gradient_accumulation_steps`-th micro-batch ends an optimizer step, and its
backward pass reduces the sum of the gradients. In unmanaged mode every call of `step()` steps.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from hybrid_engine.distributed.verdict import Problem, everyone
from hybrid_engine.optim.training_state import TrainingState
from hybrid_engine.zero.gathered_parameters import LATE
from hybrid_engine.zero.split_module import together


class GradientAccumulation:
    """The position of one engine between two optimizer steps."""

    def __init__(self, training: TrainingState) -> None:
        self._training = training
        self.is_managed = training.config.managed_gradient_accumulation
        self.num_passes = 0
        """Number of backward passes since the last `step()`."""
        self._boundary: bool | None = None
        self._is_stepping = False
        self._block: str | None = None
        self.has_unreduced = False
        """Whether backward passes left gradients that are not reduced."""
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
        return (self._training.micro_steps + 1) % self._training.config.gradient_accumulation_steps == 0

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Sets whether each micro-batch from now on ends an optimizer step; None returns to counting them."""
        if not self.is_managed:
            raise ValueError(
                "set_gradient_accumulation_boundary(): with managed_gradient_accumulation=false every step() is the "
                "boundary; leave the call out, or the option"
            )
        self._boundary = is_boundary

    def set_batch_sizes(self, micro_batch_size: int, num_micro_batches: int) -> None:
        """Changes the batch sizes of a step, between two steps; with the same values on all processes.

        Raises:
            ValueError: micro-batches of a step are done.
        """
        training = self._training
        if training.num_pending_micro_batches:
            raise ValueError(
                f"batch sizes: {training.num_pending_micro_batches} micro-batches of a step are done; change them "
                f"after the step() that ends the accumulation"
            )
        training.config = replace(
            training.config,
            train_batch_size=micro_batch_size * num_micro_batches * training.sharding.num_units,
            train_micro_batch_size_per_gpu=micro_batch_size,
            gradient_accumulation_steps=num_micro_batches,
        )
        training.micro_steps = training.global_steps * num_micro_batches

    def agree_to_begin(self, error: BaseException | None = None) -> None:
        """Called before each backward pass; collective if its gradients are reduced.

        Raises:
            BaseException: `error`, which keeps this process from starting, or the error of another one.
        """
        passes = self._training.passes
        self.is_collective = self._block is None and (passes.reduces_always or (self.is_managed and self.is_boundary()))
        if self.is_collective:
            self._is_alike = passes.came_alike(error)
        elif error is not None:
            raise error

    def begin_pass(self) -> None:
        """Called after `agree_to_begin`; sets whether the pass reduces the gradients.

        Raises:
            ValueError: the processes used different layers, at stage 3; raised on all.
        """
        passes = self._training.passes
        if self.is_collective:
            passes.check_layers(self._is_alike)
        self._waits_for_end = self.is_collective and not self._is_alike
        passes.expect_gradients(self._reduces)
        self.has_unreduced = self._training.sharding.is_sharded and not self._reduces

    @property
    def _reduces(self) -> bool:
        """Whether the current backward pass reduces the gradients itself."""
        return self.is_collective and self._is_alike

    def run_pass(self, run: Callable[[], None]) -> None:
        """Runs a backward pass, or the rest of it; at its end all processes learn about an error on one.

        Raises:
            BaseException: the error of this process, or of another one.
        """
        if self.is_collective:
            self._training.passes.pass_together(run, self._reduces)
        else:
            run()

    def leave_pass(self, problem: Problem) -> None:
        """Called after a backward pass that ended with an error, which this process has raised already."""
        with suppress(RuntimeError), together(self._training.module):
            raise RuntimeError(problem.text)
        if self.is_collective:
            self._training.passes.leave(problem, self._reduces)

    def end_pass(self) -> None:
        """Counts a complete backward pass."""
        self.num_passes += 1

    def reduce_at_end(self) -> None:
        """After a backward pass whose layers differed between processes: reduces the gradients that it left."""
        if self._waits_for_end:
            self.reduce()

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

    def num_samples(self) -> int:
        """Samples of the current optimizer step, over all processes."""
        config = self._training.config
        if self.is_managed:
            return config.train_batch_size
        return self.num_passes * config.train_micro_batch_size_per_gpu * self._training.sharding.num_units

    def _begin_step(self, is_boundary: bool, error: BaseException | None) -> None:
        if is_boundary and self.has_unreduced:
            everyone().raise_together(error)
            self.reduce()
        elif error is not None and not (is_boundary and self._training.passes.has_partners):
            raise error

    def check_pass(self) -> None:
        """Raises ValueError if the backward pass left gradients unreduced: a layer's parameter was used before it."""
        if self._reduces:
            self.check_reduced()

    def check_reduced(self) -> None:
        """Raises ValueError if the optimizer cannot step: a parameter of a layer was used before it."""
        if self._training.passes.has_late_gradients():
            raise ValueError(LATE)

    def reduce(self) -> None:
        """Reduces the gradients that earlier backward passes left unreduced; collective."""
        assert self._training.optimizer is not None
        self._training.passes.reduce_gradients()
        self._training.optimizer.accumulate_gradients()
        self.has_unreduced = self._waits_for_end = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside do not reduce; the next one that ends a step, or `step()`, reduces their sum.

        Raises:
            ValueError: at stages 2 and 3, which reduce at every micro-batch; inside another block without reduction.
        """
        sharding = self._training.sharding
        if self._training.passes.reduces_always:
            raise ValueError(
                f"no_sync(): zero_optimization.stage={sharding.stage} keeps only shards of the gradients and reduces "
                f"them at every micro-batch; use stage 0 or 1, or coalesce_grad_reduction(), or leave no_sync() out"
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
        if self.has_unreduced:
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
