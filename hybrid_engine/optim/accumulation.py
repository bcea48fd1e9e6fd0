"""Gradient accumulation: which backward passes reduce gradients, and which calls of `step()` step.

Managed, as it is unless the config says otherwise, every `gradient_accumulation_steps`-th micro-batch ends an optimizer
step, and its backward pass reduces the sum where the earlier ones did not. Unmanaged, every call of `step()` steps.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from hybrid_engine.distributed.verdict import Problem, everyone
from hybrid_engine.optim.training_state import TrainingState
from hybrid_engine.zero.gathered_parameters import LATE
from hybrid_engine.zero.split_module import together


class GradientAccumulation:
    """Where one engine is between two optimizer steps."""

    def __init__(self, training: TrainingState) -> None:
        self._training = training
        self.is_managed = training.config.managed_gradient_accumulation
        self.num_passes = 0
        """Backward passes since the last `step()`."""
        self._boundary: bool | None = None
        self._is_stepping = False
        self._block: str | None = None
        self.has_unreduced = False
        """Whether backward passes left gradients that no process has reduced."""
        self._waits_for_end = False
        self.is_collective = False
        """Whether the gradients of the backward pass under way are reduced in it or at its end."""
        self._is_alike = True

    def is_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its optimizer step; unmanaged, whether `step()` runs."""
        if self._boundary is not None:
            return self._boundary
        if not self.is_managed:
            return self._is_stepping
        return (self._training.micro_steps + 1) % self._training.config.gradient_accumulation_steps == 0

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Says whether each micro-batch from now on ends an optimizer step; None counts them again."""
        if not self.is_managed:
            raise ValueError(
                "set_gradient_accumulation_boundary(): with managed_gradient_accumulation=false every step() is the "
                "boundary; leave the call out, or the option"
            )
        self._boundary = is_boundary

    def set_batch_sizes(self, micro_batch_size: int, num_micro_batches: int) -> None:
        """Changes what a step is made of, between two steps; alike on all processes.

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
        """Before each backward pass; collective where its gradients are reduced.

        Raises:
            BaseException: `error`, for which this process cannot begin, or that of another one.
        """
        passes = self._training.passes
        self.is_collective = self._block is None and (passes.reduces_always or (self.is_managed and self.is_boundary()))
        if self.is_collective:
            self._is_alike = passes.came_alike(error)
        elif error is not None:
            raise error

    def begin_pass(self) -> None:
        """After `agree_to_begin`: says whether the pass reduces the gradients.

        Raises:
            ValueError: the processes came through different layers, at stage 3; on all alike.
        """
        passes = self._training.passes
        if self.is_collective:
            passes.check_layers(self._is_alike)
        self._waits_for_end = self.is_collective and not self._is_alike
        passes.expect_gradients(self._reduces)
        self.has_unreduced = self._training.sharding.is_sharded and not self._reduces

    @property
    def _reduces(self) -> bool:
        """Whether the backward pass under way reduces the gradients itself."""
        return self.is_collective and self._is_alike

    def run_pass(self, run: Callable[[], None]) -> None:
        """Runs a backward pass, or what is left of it, at whose end all processes hear of an error of one.

        Raises:
            BaseException: the error of this process, or that of another one.
        """
        if self.is_collective:
            self._training.passes.pass_together(run, self._reduces)
        else:
            run()

    def leave_pass(self, problem: Problem) -> None:
        """After a backward pass that an error has ended, where this process has raised it already."""
        with suppress(RuntimeError), together(self._training.module):
            raise RuntimeError(problem.text)
        if self.is_collective:
            self._training.passes.leave(problem, self._reduces)

    def end_pass(self) -> None:
        """Notes that a backward pass has ended."""
        self.num_passes += 1

    def reduce_at_end(self) -> None:
        """After a backward pass whose layers were not the same on all processes: reduces now what it could not."""
        if self._waits_for_end:
            self.reduce()

    def check_step(self) -> None:
        """Raises ValueError where `step()` cannot be: inside a block without reduction, without a backward pass."""
        if self._block is not None:
            raise ValueError(f"step(): inside {self._block} gradients are not reduced; step after it")
        if self.num_passes == 0:
            raise ValueError("step(): there are no gradients; call backward(loss) before each step()")

    @contextmanager
    def step(self, error: BaseException | None = None) -> Iterator[bool]:
        """Around `step()`, which is told whether it steps the optimizer; what is not reduced then is. Collective.

        Raises:
            BaseException: `error`, for which this process cannot step, unless others are told of it inside; where the
                processes reduce here, also that of another one.
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
        """Samples of the optimizer step under way, over all processes."""
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
        """Raises ValueError where the backward pass did not reduce what it was to: a parameter of a layer came late."""
        if self._reduces:
            self.check_reduced()

    def check_reduced(self) -> None:
        """Raises ValueError where the optimizer cannot step: a parameter of a layer was used before it."""
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
        """Backward passes inside reduce no gradients; the next one that ends a step, or `step()`, reduces their sum.

        Raises:
            ValueError: at stages 2 and 3, which reduce at every micro-batch; inside another such block.
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
        """Backward passes inside reduce no gradients; their sum is reduced once, at the end of the block. Collective.

        Raises:
            ValueError: inside another such block; with `managed_gradient_accumulation=false`.
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
