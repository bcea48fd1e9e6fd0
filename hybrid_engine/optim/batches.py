"""What `train_batch()` and `eval_batch()` run: all micro-batches of an optimizer step, one after the other.

A module in stages runs them at once instead: see `extensions/parallelize/stage_training.py`.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hybrid_engine.optim.backward_hooks import BackwardHooks
from hybrid_engine.optim.call_checks import CallChecks
from hybrid_engine.optim.training_state import TrainingState

LossFunction = Callable[[Any, Any], Tensor]
"""From what the module gives for a micro-batch, and its targets, to one number."""


class Training(TrainingState, Protocol):
    """An engine that trains."""

    checks: CallChecks
    backward_hooks: BackwardHooks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""

    def backward(self, loss: Tensor) -> Tensor:
        """Adds up the gradients of a micro-batch."""

    def step(self) -> None:
        """Ends a micro-batch."""


class Batches(Protocol):
    """How the micro-batches of a step go through a module; collective as forward and backward passes are."""

    def train(self, batches: Iterable[Any], loss_fn: LossFunction | None) -> Tensor:
        """An optimizer step on the next micro-batches; their mean loss. See `ZeroEngine.train_batch`."""

    def evaluate(self, batches: Iterable[Any]) -> list[Any]:
        """What the module gives for each of them. See `ZeroEngine.eval_batch`."""


class SuccessiveBatches:
    """Each micro-batch goes through the whole module before the next one does."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def train(self, batches: Iterable[Any], loss_fn: LossFunction | None) -> Tensor:
        """Forward, backward and step of each. See `Batches`."""
        return torch.stack([self._train_on(batch, loss_fn) for batch in next_batches(self._training, batches)]).mean()

    def evaluate(self, batches: Iterable[Any]) -> list[Any]:
        """The forward of each. See `Batches`."""
        return [self._forward(split_batch(batch)[0]) for batch in next_batches(self._training, batches)]

    def _train_on(self, batch: Any, loss_fn: LossFunction | None) -> Tensor:
        inputs, targets = split_batch(batch)
        loss = loss_of(self._forward(inputs), targets, loss_fn)
        self._training.backward(loss)
        self._training.step()
        return loss.detach()

    def _forward(self, inputs: Any) -> Any:
        return self._training(**inputs) if isinstance(inputs, Mapping) else self._training(inputs)


def next_batches(training: TrainingState, batches: Iterable[Any]) -> list[Any]:
    """The micro-batches of the next step, from the front of `batches`; ValueError where there are too few."""
    wanted = training.config.gradient_accumulation_steps
    given = list(islice(batches, wanted))
    if len(given) < wanted:
        raise ValueError(
            f"batches: {len(given)} micro-batches are left, and a step takes gradient_accumulation_steps={wanted}; "
            "give as many"
        )
    return given


def split_batch(batch: Any) -> tuple[Any, Any]:
    """What the module is given of a micro-batch, and what `loss_fn` is: of a pair one each, else both the same."""
    return batch if isinstance(batch, tuple) and len(batch) == 2 else (batch, batch)


def loss_of(result: Any, targets: Any, loss_fn: LossFunction | None) -> Tensor:
    """The loss of a micro-batch: what `loss_fn` makes of the module's result, or the first tensor of that.

    ValueError for what is not one number.
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
