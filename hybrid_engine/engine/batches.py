"""The micro-batches of a step: one after the other, or all at once through the stages of a pipeline.

`ZeroEngine.train_batch` and `eval_batch` call it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hybrid_engine.distributed.verdict import agree, restoring_modes
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.optim.state_offload import TRAINING
from hybrid_engine.zero.split_module import BatchTraining, run_batches, stages_of

if TYPE_CHECKING:
    from hybrid_engine.engine.zero_engine import ZeroEngine

LossFunction = Callable[[Any, Any], Tensor]
"""Maps the module's result for a micro-batch, and its targets, to one number."""


class Batches(Protocol):
    """Runs the micro-batches of a step through an engine's module; collective like forward and backward passes."""

    def train(self, engine: "ZeroEngine", batches: Iterable[Any], loss_fn: LossFunction | None) -> Tensor:
        """An optimizer step on the next micro-batches; returns their mean loss. See `ZeroEngine.train_batch`."""

    def evaluate(self, engine: "ZeroEngine", batches: Iterable[Any]) -> list[Any]:
        """The module's result for each of them. See `ZeroEngine.eval_batch`."""


class SuccessiveBatches:
    """Runs each micro-batch through the whole module before the next one."""

    def train(self, engine: "ZeroEngine", batches: Iterable[Any], loss_fn: LossFunction | None) -> Tensor:
        """Forward, backward and step of each. See `Batches`."""
        losses = []
        for batch in next_batches(batches, engine.counters.num_micro_batches):
            inputs, targets = split_batch(batch)
            loss = loss_of(_forward(engine, inputs), targets, loss_fn)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def evaluate(self, engine: "ZeroEngine", batches: Iterable[Any]) -> list[Any]:
        """The forward of each. See `Batches`."""
        wanted = next_batches(batches, engine.counters.num_micro_batches)
        return [_forward(engine, split_batch(batch)[0]) for batch in wanted]


def _forward(engine: "ZeroEngine", inputs: Any) -> Any:
    return engine(**inputs) if isinstance(inputs, Mapping) else engine(inputs)


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


def next_batches(batches: Iterable[Any], num_micro_batches: int) -> list[Any]:
    """The micro-batches of the next step, from the front of `batches`; raises ValueError if there are too few."""
    given = list(islice(batches, num_micro_batches))
    if len(given) < num_micro_batches:
        raise ValueError(
            f"batches: {len(given)} micro-batches are left, and a step takes gradient_accumulation_steps="
            f"{num_micro_batches}; give as many"
        )
    return given


def split_batch(batch: Any) -> tuple[Any, Any]:
    """The module's input and the targets for `loss_fn`: the two parts of a pair, otherwise the batch for both."""
    return batch if isinstance(batch, tuple) and len(batch) == 2 else (batch, batch)


def loss_of(result: Any, targets: Any, loss_fn: LossFunction | None) -> Tensor:
    """The loss of a micro-batch: the result of `loss_fn`, or the first tensor of the module's result.

    Raises ValueError if it is not one number.
    """
    if loss_fn is not None:
        loss, source = loss_fn(result, targets), "loss_fn"
    else:
        loss = next((leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)), None)
        source = "without loss_fn the first result of the module"
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"train_batch(): {source} has shape {shape}, the loss must be one number; pass loss_fn(result, targets), "
            "or batches with what the module makes its loss of (labels)"
        )
    return loss
