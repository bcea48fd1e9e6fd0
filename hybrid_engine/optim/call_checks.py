"""Whether an engine can do now what a call asks of it. All of it local, and nothing is changed."""

import os

import torch
from torch import nn

from hybrid_engine.config.checks import check_path
from hybrid_engine.optim.state_offload import TRAINING, OffloadStateTypeEnum
from hybrid_engine.optim.training_state import TrainingState
from hybrid_engine.zero.parameter_watch import ParameterWatch
from hybrid_engine.zero.split_module import num_stages_of


class CallChecks:
    """Checks of the calls that come to one engine; each raises ValueError."""

    def __init__(self, training: TrainingState) -> None:
        """Notes the parameters of the module as they are now, those that are trained and those that are not."""
        optimizer, sharding = training.optimizer, training.sharding
        trained = [entry.name for entry in optimizer.parameters] if optimizer is not None else []
        self._training = training
        self._num_stages = num_stages_of(training.module)
        self.watch = ParameterWatch(training.module, trained, sharding.twins())

    def check_parameters(self) -> None:
        """The module's parameters are those that the engine trains, and gathers."""
        if self._training.optimizer is not None or self._training.sharding.is_sharded:
            self.watch.check(self._training.module, torch.is_grad_enabled())

    def check_unchanged(self, module: nn.Module) -> None:
        """The parameters of `module` are those that processes gather together, trained or not."""
        self.watch.check(module, will_train=False)

    def check_whole(self, what: str, *kinds: OffloadStateTypeEnum) -> None:
        """No parameter is torn, and nothing of `kinds`, or of any kind where none is named, is offloaded."""
        self._training.state_offload.check(what, *kinds)
        if self._training.optimizer is not None and self._training.optimizer.is_torn:
            raise ValueError(
                f"{what}: an error came in the middle of the last step(), so that some parameters may be stepped and "
                f"others not; go on from a checkpoint, by load_checkpoint()"
            )

    def check_backward(self, loss: torch.Tensor) -> None:
        """`loss` can be gone back from, into parameters and an optimizer that lie where they belong."""
        check_loss("backward()", loss)
        self._training.state_offload.check("backward()", *TRAINING)
        self.check_parameters()

    def check_single_passes(self, what: str) -> None:
        """One forward or backward pass can be run: not in stages, of which no process has the whole module."""
        if self._num_stages > 1:
            raise ValueError(
                f"{what}: the module runs in {self._num_stages} stages, all micro-batches of a step at once; call "
                "train_batch(batches, loss_fn), or eval_batch(batches)"
            )

    def check_whole_module_saves(self, what: str) -> None:
        """All processes save the same parameters, not in stages."""
        if self._num_stages > 1:
            raise ValueError(
                f"{what}: the module runs in {self._num_stages} stages; save what deduped_state_dict(engine, "
                "engine.optimizer) gives on each process, and load what merge_state_dicts makes of all of them by "
                "load_merged_state_dicts, into any plan, module or engine"
            )

    def check_saves(self, what: str, save_dir: str | os.PathLike[str], *kinds: OffloadStateTypeEnum) -> None:
        """There is something whole to save, and `save_dir` names a place for it."""
        self.check_whole(what, *kinds)
        check_path("save_dir", save_dir)


def check_loss(what: str, loss: torch.Tensor) -> None:
    """Raises ValueError where `loss`, given to the call `what`, is not one number that depends on parameters."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"{what}: the loss has shape {shape}, it must be one number; reduce it, e.g. loss.mean()")
    if not loss.requires_grad:
        raise ValueError(
            f"{what}: the loss does not depend on trainable parameters (requires_grad is False); compute it from the "
            "engine's output outside torch.no_grad()"
        )
