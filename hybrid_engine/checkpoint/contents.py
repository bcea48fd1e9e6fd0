"""Contents of a checkpoint of an engine: tensors by name, plain values, and the manifest that describes them.

A trained bf16 or fp16 parameter is stored as its fp32 master only, because the parameter is the rounded master.
"""

import random
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

from hybrid_engine.checkpoint.comparison import describe_optimizer
from hybrid_engine.config import EngineConfig
from hybrid_engine.distributed.dataloader import TrainingDataLoader
from hybrid_engine.distributed.processes import gather_objects
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.optim.accumulation import GradientAccumulation, StepCounters
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.zero.sharding import Sharding, saved_buffers

if TYPE_CHECKING:
    from hybrid_engine.checkpoint.saving import RunLock

Result = TypeVar("Result")
WEIGHTS = "weights."
"""Prefix of the keys of weights and buffers."""
OPTIMIZER = "optimizer."
"""Prefix of the keys of the optimizer's state, `optimizer.<key of the state>.<name of the parameter>`."""
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
MEASURED = ("logprob_difference",)
"""Metrics that training reads later, each None or a mean and a maximum."""


class TrainingState(Protocol):
    """What a checkpoint saves and restores; `ZeroEngine` is one."""

    config: EngineConfig
    module: nn.Module
    sharding: Sharding
    optimizer: ZeroOptimizer | None
    """The optimizer shim; None in an engine that does not train."""
    lr_scheduler: Any
    training_dataloader: TrainingDataLoader | None
    counters: StepCounters
    accumulation: GradientAccumulation
    run_lock: "RunLock"

    def measured_values(self) -> dict[str, Any]:
        """Metrics that training measured and reads later, for a checkpoint: plain values by name."""

    def restore_measured_values(self, values: dict[str, Any]) -> None:
        """Restores the result of `measured_values`; raises errors for values of another kind."""


def with_shards(training: TrainingState, action: Callable[[], Result]) -> Result:
    """Runs `action` while the parameters are shards, and returns its result or raises its error; collective.

    Below stage 3 they are whole again afterwards, also after an error, which must be raised on every process.
    """
    failure: BaseException | None = None
    with training.sharding.as_shards():
        try:
            result = action()
        except BaseException as error:
            failure = error
    if failure is not None:
        raise failure
    return result


def collect_weights(training: TrainingState) -> dict[str, torch.Tensor]:
    """The parameters, or their masters, and the buffers that are saved, by key; as shards if they are sharded."""
    masters = {t.name: t.master for t in training.optimizer.parameters} if training.optimizer is not None else {}
    named = {**dict(training.module.named_parameters()), **masters, **saved_buffers(training.module)}
    return {f"{WEIGHTS}{name}": tensor.detach() for name, tensor in named.items()}


def collect_tensors(training: TrainingState) -> dict[str, torch.Tensor]:
    """The weights and the tensors of the optimizer's state, by their keys."""
    if training.optimizer is None:
        return collect_weights(training)
    return {**collect_weights(training), **optimizer_keys(_named_optimizer_state(training.optimizer, tensors=True))}


def optimizer_keys(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of an optimizer's state by key; `state` has them by parameter name."""
    return {f"{OPTIMIZER}{key}.{name}": value for name, values in state.items() for key, value in values.items()}


def other_copies(training: TrainingState) -> set[str]:
    """Names that this process does not save because rank 0 does: buffers, which each process holds in full."""
    return set(saved_buffers(training.module)) if training.sharding.rank else set()


def frozen_names(training: TrainingState) -> set[str]:
    """Names of the parameters that require no gradient."""
    trained = {t.name for t in training.optimizer.parameters} if training.optimizer is not None else set()
    return {name for name, p in training.module.named_parameters() if not p.requires_grad} - trained


def collect_values(training: TrainingState) -> dict[str, Any]:
    """Counters, metrics, the states of scheduler, loss scaler and data loader, and every process's random state.

    Collective.
    """
    values = agree(lambda: _collect_own_values(training))
    values["random"] = gather_objects(get_random_state())
    return values


def _collect_own_values(training: TrainingState) -> dict[str, Any]:
    values: dict[str, Any] = {name: getattr(training.counters, name) for name in COUNTERS}
    values["measured"] = training.measured_values()
    if training.optimizer is not None:
        values["loss_scaler"] = training.optimizer.loss_scaler.state_dict()
        values["param_groups"] = named_param_groups(training.optimizer)
        values["optimizer_values"] = _named_optimizer_state(training.optimizer, tensors=False)
    if training.lr_scheduler is not None:
        values["lr_scheduler"] = training.lr_scheduler.state_dict()
    if training.training_dataloader is not None:
        values["dataloader"] = training.training_dataloader.state_dict()
    return values


def build_manifest(training: TrainingState, left_out: Collection[str] = ()) -> dict[str, Any]:
    """The manifest that `comparison.py` compares; `left_out` are the names of parameters that are not saved."""
    optimizer = training.optimizer
    shapes = {key.removeprefix(WEIGHTS): list(tensor.shape) for key, tensor in collect_weights(training).items()}
    return {
        "world_size": training.sharding.world_size,
        "stage": training.sharding.stage,
        "dtype": str(training.config.dtype),
        "shapes": {name: shape for name, shape in shapes.items() if name not in left_out},
        "left_out": {name: shape for name, shape in shapes.items() if name in left_out},
        "tied": _tied_names(training.module),
        "frozen": sorted(frozen_names(training)),
        "has_scheduler": training.lr_scheduler is not None,
        "scheduler": None if training.lr_scheduler is None else type(training.lr_scheduler).__name__,
        "optimizer": None if optimizer is None else describe_optimizer(optimizer.inner),
        "groups": None if optimizer is None else [group["names"] for group in named_param_groups(optimizer)],
        "pending_micro_batches": training.counters.num_pending_micro_batches + (training.accumulation.num_passes > 0),
    }


def named_param_groups(optimizer: ZeroOptimizer) -> list[dict[str, Any]]:
    """The optimizer's groups with the `names` of parameters instead of `params`."""
    names = {id(t.master): t.name for t in optimizer.parameters}
    return [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "names": [names[id(p)] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]


def _named_optimizer_state(optimizer: ZeroOptimizer, *, tensors: bool) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter name: either its tensors or its other values."""
    return {
        t.name: {
            key: value
            for key, value in optimizer.state.get(t.master, {}).items()
            if isinstance(value, torch.Tensor) == tensors
        }
        for t in optimizer.parameters
    }


def _tied_names(module: nn.Module) -> dict[str, str]:
    """The additional names of parameters that have several, each with the first name."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in named if first.setdefault(id(p), name) != name}


def get_random_state() -> dict[str, Any]:
    """The random states as values that `torch.load(weights_only=True)` can read."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restores a result of `get_random_state`; a GPU's state is ignored on a machine without one."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_everything(seed: int) -> None:
    """Seeds every generator whose state is kept here."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
