"""`deepspeed.DeepSpeedConfig`, `runtime.config` and the modules of constants: a config, read and checked."""

from collections.abc import Mapping
from datetime import timedelta
from enum import IntEnum
from typing import Any

from hybrid_engine.config import load_config
from hybrid_engine.config.blocks import ZeroConfig
from hybrid_engine.distributed.processes import get_world_size
from hybrid_engine.engine.deepspeed_engine import ROUTE_TRAIN as ROUTE_TRAIN

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
