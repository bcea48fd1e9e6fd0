"""The micro-batches of an engine's step through the stages of its module: losses, their scale, shared gradients."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_engine.distributed.interrupts import restoring_modes
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.extensions.parallelize.reducer import Reducer
from hybrid_engine.optim.batches import LossFunction, Training, loss_of, next_batches, split_batch
from hybrid_engine.optim.state_offload import TRAINING

if TYPE_CHECKING:
    from hybrid_engine.extensions.parallelize.staged_module import StagedModule


class StagedBatches:
    """Runs the micro-batches of one engine, all of a step at once. An error of one process is raised on all."""

    def __init__(self, training: Training, module: "StagedModule") -> None:
        """`module` is the engine's, in stages; collective."""
        self._training, self._module = training, module
        self._reducers = []
        parameters = training.optimizer.parameters if training.optimizer is not None else []
        for names, group in module.groups_of_holders():
            shared = [t for t in parameters if self._module.canonical(t.name) in names]
            if shared and training.optimizer is not None:
                self._reducers.append(Reducer([t.param for t in shared], group))
                training.optimizer.norms.count_holders({t.name: dist.get_world_size(group) for t in shared})

    def train(self, batches: Iterable[Any], loss_fn: LossFunction | None) -> Tensor:
        """Their passes through the stages, and the step. See `Batches`; after an error gradients are dropped."""
        training = self._training
        given = agree(lambda: self._checked(batches))
        try:
            observed = training.observer.forward(training.global_steps, True)
            with restoring_modes(), observed, training.backward_hooks.own_pass(1.0):
                losses = self._run(given, loss_fn)
        except BaseException:
            training.drop_accumulation()
            training.sharding.settle()
            raise
        with training.observer.backward(losses.sum()):
            training.accumulation.end_pass()
        training.num_pending_micro_batches = len(given) - 1
        training.micro_steps += len(given) - 1
        training.step()
        return losses.mean()

    def evaluate(self, batches: Iterable[Any]) -> list[Any]:
        """What the last stage gives for each, on all processes of the unit. See `Batches`."""
        given = agree(lambda: next_batches(self._training, batches))
        return self._module.run_batches([split_batch(batch)[0] for batch in given], None)

    def _checked(self, batches: Iterable[Any]) -> list[Any]:
        self._training.checks.check_whole("train_batch()", *TRAINING)
        self._training.checks.check_parameters()
        return next_batches(self._training, batches)

    def _run(self, batches: Sequence[Any], loss_fn: LossFunction | None) -> Tensor:
        """The losses `[micro-batches]` fp32, on all processes of the unit; their gradients are added up."""
        optimizer, device = self._training.optimizer, self._training.device
        assert optimizer is not None
        losses = torch.zeros(len(batches), device=device)
        factor = self._training.passes.loss_factor / len(batches)

        def scaled(result: Any, place: int) -> Tensor:
            loss = loss_of(result, split_batch(batches[place])[1], loss_fn)
            losses[place] = loss.detach()
            return optimizer.scale_loss(loss.float() * factor)

        self._training.passes.expect_gradients(True)
        self._module.run_batches([split_batch(batch)[0] for batch in batches], scaled, returns_results=False)
        for reducer in self._reducers:
            reducer.reduce()
        optimizer.accumulate_gradients()
        stages = self._module.meshes.stages
        assert stages is not None
        dist.broadcast(losses, group_src=stages.size() - 1, group=stages.get_group())
        return losses
