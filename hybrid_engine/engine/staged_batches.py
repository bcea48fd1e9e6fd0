"""The micro-batches of an engine over a module in pipeline stages, all of a step at once: `ZeroEngine.train_batch`."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybrid_engine.distributed.interrupts import restoring_modes
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.optim.accumulation import LossFunction, loss_of, next_batches, split_batch
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.optim.state_offload import TRAINING
from hybrid_engine.zero.split_module import BatchTraining, run_batches, stages_of

if TYPE_CHECKING:
    from hybrid_engine.engine.zero_engine import ZeroEngine


class StagedBatches:
    """Runs the micro-batches of one engine through the stages. An error of one process is raised on all."""

    def __init__(self, optimizer: ZeroOptimizer | None, module: nn.Module) -> None:
        """Takes the engine's optimizer and module; tells the optimizer which parameters several stages hold."""
        self._trained = {} if optimizer is None else {entry.name: entry.param for entry in optimizer.parameters}
        if optimizer is not None:
            optimizer.norms.count_holders({name: len(stages_of(module, name)) for name in self._trained})

    def train(self, engine: "ZeroEngine", batches: Iterable[Any], loss_fn: LossFunction | None) -> Tensor:
        """Runs the micro-batches through the stages, and the step. See `Batches`; an error drops gradients."""
        given = agree(lambda: self._checked(engine, batches))
        try:
            observed = engine.observer.forward(engine.counters.global_steps, True)
            with restoring_modes(), observed, engine.backward_hooks.own_pass(1.0):
                losses = self._run(engine, given, loss_fn)
        except BaseException:
            engine.drop_accumulation()
            engine.sharding.settle()
            raise
        with engine.observer.backward():
            engine.accumulation.end_pass()
        engine.counters.add_loss(losses.sum())
        engine.counters.num_pending_micro_batches = len(given) - 1
        engine.counters.micro_steps += len(given) - 1
        engine.step()
        return losses.mean()

    def evaluate(self, engine: "ZeroEngine", batches: Iterable[Any]) -> list[Any]:
        """The results of the last stage for each batch, on all processes of the unit. See `Batches`."""
        given = agree(lambda: next_batches(batches, engine.counters.num_micro_batches))
        return run_batches(engine.module, [split_batch(batch)[0] for batch in given])

    def _checked(self, engine: "ZeroEngine", batches: Iterable[Any]) -> list[Any]:
        engine.checks.check_whole("train_batch()", *TRAINING)
        engine.checks.check_parameters(engine.module)
        return next_batches(batches, engine.counters.num_micro_batches)

    def _run(self, engine: "ZeroEngine", batches: Sequence[Any], loss_fn: LossFunction | None) -> Tensor:
        """The losses `[micro-batches]` fp32, on all processes of the unit; accumulates their gradients."""
        optimizer = engine.optimizer
        assert optimizer is not None
        factor = engine.passes.loss_factor / len(batches)
        training = BatchTraining(
            loss=lambda result, place: loss_of(result, split_batch(batches[place])[1], loss_fn),
            scale=lambda loss: optimizer.scale_loss(loss.float() * factor),
            parameters=self._trained,
        )
        engine.passes.expect_gradients(True)
        losses = run_batches(engine.module, [split_batch(batch)[0] for batch in batches], training)
        optimizer.accumulate_gradients()
        return torch.stack(losses)
