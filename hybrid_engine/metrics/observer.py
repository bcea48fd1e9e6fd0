"""What an engine reports of its steps: progress lines, times, operations and curves, as its config asks for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from hybrid_engine.config import EngineConfig
from hybrid_engine.metrics.flops import FlopsProfiler
from hybrid_engine.metrics.monitor import Monitor
from hybrid_engine.metrics.timing import StepTimers, ThroughputTimer


class SteppedOptimizer(Protocol):
    """What a progress line says of an optimizer that has just stepped."""

    param_groups: list[dict[str, Any]]
    grad_norm: float
    """The gradients' 2-norm, before clipping and without the loss scale."""

    @property
    def cur_scale(self) -> float:
        """The loss scale."""


class Observer:
    """Watches the forward passes, backward passes and steps of one engine."""

    def __init__(self, config: EngineConfig, device: torch.device, rank: int) -> None:
        self.config = config
        self.rank = rank
        self.timers = StepTimers(device, config.wall_clock_breakdown)
        self.flops = FlopsProfiler(config.flops_profiler, device, is_writer=rank == 0)
        self.monitor = Monitor(config, rank)
        self.throughput = ThroughputTimer(config.train_batch_size)
        self._loss_sum: torch.Tensor | None = None

    @contextmanager
    def forward(self, global_steps: int, is_training: bool) -> Iterator[None]:
        """Around a forward pass; one without a gradient is not counted."""
        if not is_training or not torch.is_grad_enabled():
            yield
            return
        self.throughput.start()
        self.flops.start(global_steps)
        with self.timers.measure("forward"):
            yield

    @contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Around a backward pass from `loss`, as the caller computed it."""
        with self.timers.measure("backward"):
            yield
        self.flops.stop()
        # Added on the device: reading the number would wait for it at every micro-batch.
        self._loss_sum = loss.detach() if self._loss_sum is None else self._loss_sum + loss.detach()

    @contextmanager
    def step(self, is_boundary: bool) -> Iterator[None]:
        """Around the end of a micro-batch."""
        self.flops.stop()  # a backward pass that PyTorch started did not
        with self.timers.measure("step"):
            yield
        self.throughput.stop(global_step=is_boundary)

    def forget_losses(self) -> None:
        """Drops the losses of the micro-batches since the last optimizer step."""
        self._loss_sum = None

    def finish_step(self, optimizer: SteppedOptimizer, global_steps: int, global_samples: int, skipped: int) -> None:
        """Prints and writes what the config asks for after an optimizer step; rank 0 only."""
        every = self.config.steps_per_print
        prints = self.rank == 0 and every > 0 and global_steps % every == 0
        if not (prints or self.monitor.enabled):
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        line, events = f"step={global_steps}", []
        if self._loss_sum is not None:  # only backward passes that the engine starts are told the loss
            loss = self._loss_sum.item() / self.config.gradient_accumulation_steps
            line += f" loss={loss:.6g}"
            events.append(("Train/Samples/train_loss", loss, global_samples))
        if prints:
            print(
                f"{line} lr={rates} grad_norm={optimizer.grad_norm:.6g} loss_scale={optimizer.cur_scale:g} "
                f"skipped={skipped}",
                flush=True,
            )
        events.append(("Train/Samples/lr", rates[0], global_samples))
        if self.config.fp16.enabled:
            events.append(("Train/Samples/loss_scale", optimizer.cur_scale, global_samples))
        self.monitor.write_events(events)

    def print_times(self, global_steps: int) -> None:
        """Prints the milliseconds since the last line, on rank 0, where a progress line is due; else nothing.

        Without `steps_per_print` every step has its line, as the times would be seen nowhere.
        """
        every = self.config.steps_per_print or 1
        if not self.timers.is_enabled or global_steps % every:
            return
        parts = " ".join(f"{part}={milliseconds:.2f}" for part, milliseconds in self.timers.take().items())
        if self.rank == 0:
            print(f"step={global_steps} ms: {parts}", flush=True)
