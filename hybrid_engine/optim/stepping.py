"""The end of a micro-batch, and at the boundary the optimizer step: all processes agree on it, then it is counted.

Also the checks of an engine's calls, and `train_batch`, which runs the micro-batches of a step.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hybrid_engine.config.checks import check_path
from hybrid_engine.distributed.verdict import attempt
from hybrid_engine.optim.backward_hooks import BackwardHooks
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.optim.state_offload import TRAINING, OffloadStateTypeEnum
from hybrid_engine.optim.training_state import TrainingState
from hybrid_engine.zero.parameter_watch import ParameterWatch
from hybrid_engine.zero.split_module import num_stages_of

LossFunction = Callable[[Any, Any], Tensor]
"""Maps the module's result for a micro-batch, and its targets, to one number."""


def end_micro_batch(training: TrainingState, lr_kwargs: dict[str, Any], error: BaseException | None) -> None:
    """Counts a micro-batch; at the accumulation boundary the optimizer and the scheduler step. Collective there.

    Args:
        training: changed in place.
        lr_kwargs: keyword arguments of the scheduler's `step()`.
        error: the error that keeps this process from stepping, or None.

    Raises:
        BaseException: `error`, or at the boundary the error of another process. See `ZeroEngine.step`.
    """
    with training.accumulation.step(error) as is_boundary, training.observer.step(is_boundary):
        if is_boundary:
            _step_optimizer(training, lr_kwargs, error)
        else:
            training.num_pending_micro_batches += 1
    training.micro_steps += 1
    if is_boundary:
        training.observer.print_times(training.global_steps)


def count_empty_step(training: TrainingState) -> None:
    """Counts an optimizer step without gradients: weights and the optimizer's state stay, the scheduler steps.

    Raises:
        ValueError: micro-batches of a step are done.
    """
    if training.accumulation.num_passes or training.num_pending_micro_batches:
        raise ValueError("pass_step(): micro-batches of a step are done; end it with step(), or begin_step_again()")
    optimizer = training.optimizer
    assert optimizer is not None
    optimizer.forget_norms()
    training.global_steps += 1
    training.global_samples += training.config.train_batch_size
    if training.lr_scheduler is not None:
        with warnings.catch_warnings():
            # PyTorch warns about a wrong order if the optimizer has not stepped yet.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            training.lr_scheduler.step()
    training.observer.finish_step(optimizer, training.global_steps, training.global_samples, training.skipped_steps)


def _step_optimizer(training: TrainingState, lr_kwargs: dict[str, Any], error: BaseException | None) -> None:
    optimizer = training.optimizer
    assert optimizer is not None
    is_held, error_now = attempt(lambda: _prepare(training, optimizer))
    error = training.passes.drop_unused_gradients(optimizer.parameters, error_now if error is None else error)
    if error is None:
        try:
            optimizer.step()
        except ValueError as refusal:  # raised on every process
            error = refusal
    if error is not None:
        training.drop_accumulation()
        training.sharding.settle()
        raise error
    training.sharding.settle_stepped(bool(is_held), {id(trained.param) for trained in optimizer.parameters})
    _count_step(training, lr_kwargs)
    training.zero_grad()


def _prepare(training: TrainingState, optimizer: ZeroOptimizer) -> bool:
    """All parts of a step that may fail and change nothing yet; local. Returns the argument of `settle_stepped`."""
    training.accumulation.check_reduced()
    is_held = training.sharding.become_shards_to_step(len(optimizer.parameters))
    optimizer.take_gradients()
    return is_held


def _count_step(training: TrainingState, lr_kwargs: dict[str, Any]) -> None:
    assert training.optimizer is not None
    training.global_steps += 1
    training.global_samples += training.accumulation.num_samples()
    if training.optimizer.overflow:
        training.skipped_steps += 1
    elif training.lr_scheduler is not None:
        training.lr_scheduler.step(**lr_kwargs)
    training.observer.finish_step(
        training.optimizer, training.global_steps, training.global_samples, training.skipped_steps
    )


class CallChecks:
    """Checks of the calls of one engine; each raises ValueError."""

    def __init__(self, training: TrainingState) -> None:
        """Records the current parameters of the module, trained or not."""
        optimizer, sharding = training.optimizer, training.sharding
        trained = [entry.name for entry in optimizer.parameters] if optimizer is not None else []
        self._training = training
        self._num_stages = num_stages_of(training.module)
        self.watch = ParameterWatch(training.module, trained, sharding.twins())

    def check_parameters(self) -> None:
        """Checks that the module's parameters are those that the engine trains and gathers."""
        if self._training.optimizer is not None or self._training.sharding.is_sharded:
            self.watch.check(self._training.module, torch.is_grad_enabled())

    def check_unchanged(self, module: nn.Module) -> None:
        """Checks that the parameters of `module` are those that processes gather together, trained or not."""
        self.watch.check(module, will_train=False)

    def check_whole(self, what: str, *kinds: OffloadStateTypeEnum) -> None:
        """Checks that no parameter is torn, and that no state of `kinds` (of any kind if none is named) is
        offloaded.
        """
        self._training.state_offload.check(what, *kinds)
        if self._training.optimizer is not None and self._training.optimizer.is_torn:
            raise ValueError(
                f"{what}: an error came in the middle of the last step(), so that some parameters may be stepped and "
                f"others not; go on from a checkpoint, by load_checkpoint()"
            )

    def check_backward(self, loss: torch.Tensor) -> None:
        """Checks that `loss` can be differentiated, into parameters and an optimizer that are on their devices."""
        check_loss("backward()", loss)
        self._training.state_offload.check("backward()", *TRAINING)
        self.check_parameters()

    def check_single_passes(self, what: str) -> None:
        """Checks that a single forward or backward pass can run, which is impossible in stages."""
        if self._num_stages > 1:
            raise ValueError(
                f"{what}: the module runs in {self._num_stages} stages, all micro-batches of a step at once; call "
                "train_batch(batches, loss_fn), or eval_batch(batches)"
            )

    def check_whole_module_saves(self, what: str) -> None:
        """Checks that all processes save the same parameters, which is not so in stages."""
        if self._num_stages > 1:
            raise ValueError(
                f"{what}: the module runs in {self._num_stages} stages; save what deduped_state_dict(engine, "
                "engine.optimizer) gives on each process, and load what merge_state_dicts makes of all of them by "
                "load_merged_state_dicts, into any plan, module or engine"
            )

    def check_saves(self, what: str, save_dir: str | os.PathLike[str], *kinds: OffloadStateTypeEnum) -> None:
        """Checks that the state to save is complete, and that `save_dir` names a place for it."""
        self.check_whole(what, *kinds)
        check_path("save_dir", save_dir)


def check_loss(what: str, loss: torch.Tensor) -> None:
    """Raises ValueError, naming the call `what`, unless `loss` is one number that depends on parameters."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"{what}: the loss has shape {shape}, it must be one number; reduce it, e.g. loss.mean()")
    if not loss.requires_grad:
        raise ValueError(
            f"{what}: the loss does not depend on trainable parameters (requires_grad is False); compute it from the "
            "engine's output outside torch.no_grad()"
        )


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
    """Runs the micro-batches of a step through a module; collective like forward and backward passes."""

    def train(self, batches: Iterable[Any], loss_fn: LossFunction | None) -> Tensor:
        """An optimizer step on the next micro-batches; returns their mean loss. See `ZeroEngine.train_batch`."""

    def evaluate(self, batches: Iterable[Any]) -> list[Any]:
        """The module's result for each of them. See `ZeroEngine.eval_batch`."""


class SuccessiveBatches:
    """Runs each micro-batch through the whole module before the next one."""

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
    """The micro-batches of the next step, from the front of `batches`; raises ValueError if there are too few."""
    wanted = training.config.gradient_accumulation_steps
    given = list(islice(batches, wanted))
    if len(given) < wanted:
        raise ValueError(
            f"batches: {len(given)} micro-batches are left, and a step takes gradient_accumulation_steps={wanted}; "
            "give as many"
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
