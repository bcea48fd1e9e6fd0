"""The classes of DeepSpeed's optimizers, which code asks `engine.optimizer` for: there is one here, `ZeroOptimizer`.

isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3)   # whether the engine is one of stage 3

Also `deepspeed.ops.adagrad`, and `deepspeed.moe.utils`, which says that no parameter is one of DeepSpeed's experts.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hybrid_engine.optim.optimizer import ZeroOptimizer

DeepSpeedOptimizer = ZeROOptimizer = BF16_Optimizer = FP16_Optimizer = FP16_UnfusedOptimizer = ZeroOptimizer


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
