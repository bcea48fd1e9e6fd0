"""The state of training that saving, loading, offloading and accumulation work with."""

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
    """The optimizer shim; None in an engine that does not train."""
    lr_scheduler: Any
    training_dataloader: TrainingDataLoader | None
    accumulation: "GradientAccumulation"
    state_offload: "StateOffload"
    observer: Observer
    """Notified of each pass and each step."""
    global_steps: int
    """Optimizer steps, including those that overflowed."""
    global_samples: int
    """Samples of those steps, over all processes."""
    skipped_steps: int
    """Optimizer steps that overflowed."""
    micro_steps: int
    """Micro-batches of this process."""
    num_pending_micro_batches: int
    """Micro-batches since the last optimizer step."""
    folder_lock: Any
    """Lock on the folder that checkpoints of this run are saved into; None before the first save."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, including those of the micro-batches since the last boundary."""

    def drop_accumulation(self) -> None:
        """Drops all gradients; the next micro-batch is the first of a step again."""

    def check_trains(self, what: str) -> Any:
        """Returns the optimizer; raises ValueError, naming the call `what`, if there is none."""

    def follow_moved_weights(self) -> None:
        """Called after the parameters were given other storage."""

    def measured_values(self) -> dict[str, Any]:
        """Metrics that training measured and reads later, for a checkpoint: plain values by name."""

    def restore_measured_values(self, values: dict[str, Any]) -> None:
        """Restores the result of `measured_values`; raises errors for values of another kind."""
