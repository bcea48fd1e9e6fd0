"""`deepspeed.moe.utils`: which parameters are DeepSpeed's experts. None is; a model's own experts are parameters."""

from typing import Any

from torch import nn


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
