"""Whether a model and an optimizer can be trained at all, asked before anything is changed."""

import inspect
import math
from functools import partial
from typing import Any

import torch
from torch import nn

from hybrid_engine.config.checks import check_number
from hybrid_engine.containers.quantised import is_quantised
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.optim.param_groups import NamedGroup

NOT_NEGATIVE = ("lr", "weight_decay", "eps", "momentum", "alpha", "rho", "lr_decay")
"""Options of a parameter group that are finite and at least 0 in every optimizer of torch that has them."""


def check_model(model: nn.Module) -> None:
    """Raises ValueError for a model that is an engine's, that wraps itself for training, or that has no values."""
    for name, module in model.named_modules():
        path = f"model.{name}" if name else "model"
        if getattr(type(module), "is_engine", False):
            raise ValueError(
                f"{path} is a {type(module).__name__}, an engine already; pass the model that it was given"
            )
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise ValueError(f"{path} is wrapped in {type(module).__name__}; pass what is inside, {path}.module")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta":
            raise ValueError(
                f"model: {name} is on the meta device and has no values; load or initialise the weights first, or "
                f"build the model inside hybrid_engine.zero.Init()"
            )


def check_quantised(model: nn.Module, is_wrapped: bool) -> None:
    """ValueError for quantised weights in a model that FSDP2 is to wrap, as it is on several processes."""
    found = (name for name, param in model.named_parameters() if is_quantised(param))
    name = next(found, None) if is_wrapped else None
    if name is not None:
        raise ValueError(
            f"model: {name} is quantised: packed values whose scales lie beside them, of which FSDP2 can neither shard "
            "nor gather a part; train it on one process without offload_param, or load the model in full precision"
        )


def check_optimizer(optimizer: Any) -> None:
    """Raises ValueError for an optimizer, or a class of one, that the engine cannot step on masters and shards."""
    if isinstance(optimizer, ZeroOptimizer):
        raise ValueError("optimizer is a ZeroOptimizer, another engine's; pass a torch.optim optimizer of this model")
    cls: Any = optimizer if isinstance(optimizer, (type, partial)) else type(optimizer)
    while isinstance(cls, partial):
        cls = cls.func
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
        return  # a function, which says by its result
    step: Any = getattr(cls, "step")  # noqa: B009
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer={cls.__name__} computes the loss itself in step(closure), and here backward() comes before "
            f"step(); use one that steps without a closure, such as AdamW"
        )


def check_group_options(groups: list[NamedGroup]) -> None:
    """Raises ValueError for a rate, a decay or another number of a group that no optimizer can step with."""
    for index, group in enumerate(groups):
        for option, value in group.items():
            _check_option(f"optimizer: {option} of group {index}, {option}", option, value)


def _check_option(name: str, option: str, value: Any) -> None:
    if option == "betas" and isinstance(value, (tuple, list)):
        if not all(isinstance(_number(beta), (int, float)) and 0 <= _number(beta) <= 1 for beta in value):
            raise ValueError(f"{name}={value} must be numbers from 0 to 1; write them like (0.9, 0.999)")
    elif option in NOT_NEGATIVE and value is not None:
        check_number(name, _number(value), 0)
    elif isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{name}={value} must be a number; give one")


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
