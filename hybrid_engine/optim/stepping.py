"""The end of a micro-batch, and at the boundary the step of the optimizer: agreed on by all processes, then counted."""

import warnings
from typing import Any

from hybrid_engine.distributed.verdict import attempt
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.optim.training_state import TrainingState


def end_micro_batch(training: TrainingState, lr_kwargs: dict[str, Any], error: BaseException | None) -> None:
    """Counts a micro-batch; at the accumulation boundary the optimizer and the scheduler step. Collective there.

    Args:
        training: changed in place.
        lr_kwargs: what the scheduler's `step()` takes by name.
        error: why this process cannot step; None where it can.

    Raises:
        BaseException: `error`, or at the boundary that of another process. See `ZeroEngine.step`.
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
            # PyTorch takes it for a wrong order where the optimizer has not stepped yet.
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
        except ValueError as refusal:  # on every process alike
            error = refusal
    if error is not None:
        training.drop_accumulation()
        training.sharding.settle()
        raise error
    training.sharding.settle_stepped(bool(is_held), {id(trained.param) for trained in optimizer.parameters})
    _count_step(training, lr_kwargs)
    training.zero_grad()


def _prepare(training: TrainingState, optimizer: ZeroOptimizer) -> bool:
    """Everything of a step that can fail and changes nothing yet; local. Returns what `settle_stepped` asks for."""
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
