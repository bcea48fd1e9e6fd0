"""`deepspeed.utils.safe_get_local_...` and `safe_set_local_...`: what the optimizer knows of this process's shard.

They take the parameters of a stage 3 model, and are not collective. A local value has the shape of `param.ds_tensor`:
rows of the whole, where there are several processes; DeepSpeed's are flat, which values to set may be too.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hybrid_engine.engine.deepspeed_engine import (
    _grad,
    _link,
    _master,
    _state,
    safe_get_full_grad,
    safe_set_full_grad,
)
from hybrid_engine.optim.masters import renew_masters
from hybrid_engine.zero.sharding import local_tensor


@torch.no_grad()
def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """The shard as the optimizer steps it, in fp32."""
    _check_sharded(param)
    master = _master(param)
    if master is None:
        return local_tensor(param).float().clone()
    if isinstance(param, DTensor) == isinstance(master, DTensor):
        renew_masters([(local_tensor(param), local_tensor(master))])
    return local_tensor(master).float().clone()


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the shard, and its fp32 master."""
    _check_sharded(param)
    master = _master(param)
    for target in (param,) if master is None else (master, param):
        _assign(target, value)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The shard's gradient between `backward()` and `step()`, in fp32; None where there is none.

    In fp16 it is multiplied by the loss scale.
    """
    _check_sharded(param)
    grad = _grad(param)
    return None if grad is None else local_tensor(grad).float().clone()


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets what `safe_get_local_grad` gives; raises ValueError where there is none."""
    _check_sharded(param)
    grad = _grad(param)
    if grad is None:
        raise ValueError(
            "safe_set_local_grad(): the parameter has no gradient; call it between the backward() that ends the "
            "accumulation and step()"
        )
    _assign(grad, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """The optimizer's tensor `optim_state_key` of the shard; None for a parameter that is not trained.

    Raises:
        ValueError: there is no such state, or none yet: it comes with the first step.
    """
    _check_sharded(param)
    return None if _link(param) is None else local_tensor(_state(param, optim_state_key)).clone()


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets what `safe_get_local_optimizer_state` gives."""
    _check_sharded(param)
    _assign(_state(param, optim_state_key), value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Sets each whole gradient that there is to `update_func(gradient, parameter)`; collective where sharded."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def _check_sharded(param: nn.Parameter) -> None:
    if not hasattr(param, "ds_id"):
        raise ValueError(
            "safe_get_local_...(), safe_set_local_...(): the parameter is not of a stage 3 engine, it has no shard; "
            "use safe_get_full_...() and safe_set_full_...()"
        )


@torch.no_grad()
def _assign(target: torch.Tensor, value: torch.Tensor) -> None:
    own = local_tensor(target)
    if value.numel() != own.numel():
        raise ValueError(
            f"safe_set_local_...(): a value of shape {tuple(value.shape)} for a shard of shape {tuple(own.shape)}; "
            f"give this process's part, of the shape of param.ds_tensor"
        )
    own.copy_(value.reshape(own.shape))
