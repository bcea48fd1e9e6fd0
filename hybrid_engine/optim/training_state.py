"""What training is at one moment, as far as those who save, load, move or accumulate it need to know."""

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from hybrid_engine.config import EngineConfig
from hybrid_engine.distributed.dataloader import TrainingDataLoader
from hybrid_engine.metrics.observer import Observer
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.zero.passes import Passes
from hybrid_engine.zero.sharding import Sharding

if TYPE_CHECKING:
    from hybrid_engine.optim.accumulation import GradientAccumulation
    from hybrid_engine.optim.state_offload import StateOffload


class TrainingState(Protocol):
    """A module under training; `ZeroEngine` is one."""

    config: EngineConfig
    device: torch.device
    module: nn.Module
    sharding: Sharding
    passes: Passes
    optimizer: ZeroOptimizer | None
    """The optimizer shim; None where nothing is trained."""
    lr_scheduler: Any
    training_dataloader: TrainingDataLoader | None
    accumulation: "GradientAccumulation"
    state_offload: "StateOffload"
    observer: Observer
    """What is told of each pass and each step."""
    global_steps: int
    """Optimizer steps, those that overflowed included."""
    global_samples: int
    """Samples of those steps, over all processes."""
    skipped_steps: int
    """Optimizer steps that overflowed."""
    micro_steps: int
    """Micro-batches of this process."""
    num_pending_micro_batches: int
    """Those since the last optimizer step."""
    folder_lock: Any
    """Held on the folder that checkpoints of this run are saved into; None before the first save."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, also those of the micro-batches since the last boundary."""

    def drop_accumulation(self) -> None:
        """Drops all gradients; the next micro-batch is the first of a step again."""

    def check_trains(self, what: str) -> Any:
        """Raises ValueError, naming the call `what`, where there is no optimizer."""

    def follow_moved_weights(self) -> None:
        """After the parameters were given other storage."""

    def measured_values(self) -> dict[str, Any]:
        """Figures that training measured and reads later, for a checkpoint: plain values by name."""

    def restore_measured_values(self, values: dict[str, Any]) -> None:
        """Takes what `measured_values` gave; raises what values of another kind make it raise."""
