"""The micro-batches of an engine's step through the stages of its module: losses, their scale, shared gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from hybrid_engine.optim.training_state import TrainingState
from hybrid_engine.parallel.optimizer import groups_of_holders
from hybrid_engine.parallel.reducer import Reducer
from hybrid_engine.parallel.staged_module import StagedModule

LossFunction = Callable[[Any, Any], Tensor]
"""From what the module gives for a micro-batch, and its targets, to one number."""


class StageTraining:
    """Runs the micro-batches of one engine."""

    def __init__(self, training: TrainingState):
        """`training.module` is a `StagedModule`; collective."""
        assert isinstance(training.module, StagedModule)
        self._training, self.module = training, training.module
        self._reducers = []
        parameters = training.optimizer.parameters if training.optimizer is not None else []
        for names, group in groups_of_holders(self.module):
            shared = [t for t in parameters if self.module.canonical(t.name) in names]
            if shared and training.optimizer is not None:
                self._reducers.append(Reducer([t.param for t in shared], group))
                training.optimizer.norms.count_holders({t.name: dist.get_world_size(group) for t in shared})

    def run(self, batches: Sequence[Any], loss_fn: LossFunction | None) -> Tensor:
        """The losses `[micro-batches]` fp32, on all processes of the unit; their gradients are added up. Collective.

        An error of one process is raised on all; gradients are wrong then.
        """
        optimizer, device = self._training.optimizer, self._training.device
        assert optimizer is not None
        losses = torch.zeros(len(batches), device=device)
        factor = self._training.passes.loss_factor / len(batches)

        def scaled(result: Any, place: int) -> Tensor:
            loss = loss_of(result, split_batch(batches[place])[1], loss_fn)
            losses[place] = loss.detach()
            return optimizer.scale_loss(loss.float() * factor)

        self._training.passes.expect_gradients(True)
        self.module.run_batches([split_batch(batch)[0] for batch in batches], scaled, returns_results=False)
        for reducer in self._reducers:
            reducer.reduce()
        optimizer.accumulate_gradients()
        stages = self.module.meshes.stages
        assert stages is not None
        dist.broadcast(losses, group_src=stages.size() - 1, group=stages.get_group())
        return losses


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
