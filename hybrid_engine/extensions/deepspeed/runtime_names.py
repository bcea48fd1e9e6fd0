"""DeepSpeed's classes of a config and of optimizers, with the constants that its modules define.

`deepspeed.DeepSpeedConfig` and `runtime.config` read and check a config. Code asks `engine.optimizer` for the classes
of DeepSpeed's optimizers: there is one here, `ZeroOptimizer`.

    isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3)   # whether the engine is one of stage 3

Also `deepspeed.ops.adagrad`, and `deepspeed.moe.utils`, which says that no parameter is one of DeepSpeed's experts.
"""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from hybrid_engine.config import load_config
from hybrid_engine.config.blocks import ZeroConfig
from hybrid_engine.distributed.processes import get_world_size
from hybrid_engine.engine.deepspeed_engine import ROUTE_TRAIN as ROUTE_TRAIN
from hybrid_engine.optim.optimizer import ZeroOptimizer

DeepSpeedConfigError = ValueError
"""The error that a config raises if it cannot be read."""
DeepSpeedZeroConfig = ZeroConfig
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=30)
ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
DEEPSPEED_OPTIMIZERS = [ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, LION_OPTIMIZER]
"""The optimizers that the config names."""
ROUTE_EVAL = "eval"
ROUTE_PREDICT = "predict"
ROUTE_ENCODE = "encode"
"""The uses of a dataloader of `engine.deepspeed_io`."""
DeepSpeedOptimizer = ZeROOptimizer = BF16_Optimizer = FP16_Optimizer = FP16_UnfusedOptimizer = ZeroOptimizer


class ZeroStageEnum(IntEnum):
    """ZeRO's stages by DeepSpeed's names."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedConfig:
    """A config as `initialize()` would read it; the attributes are those of our `EngineConfig` and some of DeepSpeed's.

    Raises ValueError where `initialize()` does.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        """Reads `config`, a dict or the path of a JSON file, for as many processes as there are."""
        self.world_size = get_world_size()
        self.config = load_config(config, world_size=self.world_size)
        self._param_dict: Mapping[str, Any] = self.config.given

    def __getattr__(self, name: str) -> Any:
        if name == "config":
            raise AttributeError(name)
        return getattr(self.config, name)

    @property
    def zero_config(self) -> ZeroConfig:
        """The block `zero_optimization`."""
        return self.config.zero_optimization

    @property
    def zero_optimization_stage(self) -> int:
        """ZeRO's stage, 0 to 3."""
        return self.zero_config.stage

    @property
    def zero_enabled(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage > 0

    @property
    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self.config.fp16.enabled

    @property
    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bfloat16."""
        return self.config.bf16.enabled

    @property
    def optimizer_name(self) -> str | None:
        """The type of the optimizer in lower case; None without one."""
        return self.config.optimizer.type.lower() if self.config.optimizer is not None else None

    @property
    def optimizer_params(self) -> dict[str, Any] | None:
        """The arguments of the optimizer; None without one."""
        return dict(self.config.optimizer.params) if self.config.optimizer is not None else None

    @property
    def scheduler_name(self) -> str | None:
        """The type of the schedule; None without one."""
        return self.config.scheduler.type if self.config.scheduler is not None else None

    @property
    def scheduler_params(self) -> dict[str, Any] | None:
        """The arguments of the schedule; None without one."""
        return dict(self.config.scheduler.params) if self.config.scheduler is not None else None


class _AtStage3(type):
    """A class whose objects are the optimizers of stage 3, or the others."""

    is_stage_3: bool

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ZeroOptimizer) and _is_of_stage_3(instance) is cls.is_stage_3


class DeepSpeedZeroOptimizer_Stage3(ZeroOptimizer, metaclass=_AtStage3):
    """The optimizer of an engine of stage 3."""

    is_stage_3 = True


class DeepSpeedZeroOptimizer(ZeroOptimizer, metaclass=_AtStage3):
    """The optimizer of an engine of stage 0, 1 or 2."""

    is_stage_3 = False


def _is_of_stage_3(optimizer: ZeroOptimizer) -> bool:
    return any(hasattr(trained.param, "ds_id") for trained in optimizer.parameters)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad; its state is fp32 under the engine. Raises ValueError for `amsgrad`, which Adagrad does not have."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad or not fp32_optimizer_states:
            raise ValueError(f"{amsgrad=}, {fp32_optimizer_states=} are not supported; leave both out")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """False, and 0 experts: DeepSpeed's MoE layers do not exist here."""
    return False, 0


def is_moe_param(param: Any) -> bool:
    """False: no parameter is one of DeepSpeed's experts."""
    return False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """False: no group is one of DeepSpeed's experts."""
    return False


def split_params_into_shared_and_expert_params(params: list[Any]) -> tuple[list[Any], list[Any]]:
    """All groups as they are, and no groups of experts."""
    return list(params), []


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Any, max_group_size: int | float = 178956971
) -> list[dict[str, Any]]:
    """The groups as they are, in a list."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
