"""`deepspeed.utils.safe_get_...` and `safe_set_...`: whole values of the optimizer for one parameter.

They take the module's parameters at every stage of ZeRO, on one process or several; collective if the module is
sharded.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hybrid_engine.optim.masters import TrainedParameter, renew_masters
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.zero.fsdp2_private import fsdp_params, unreduced_gradient
from hybrid_engine.zero.sharding import Sharding, full_tensor, local_tensor


class OptimizerLink:
    """A parameter's link to its optimizer; a copy of the parameter does not have one, as it is not trained."""

    def __init__(self, optimizer: ZeroOptimizer, trained: TrainedParameter, record: Any) -> None:
        """`record` is FSDP2's record of the parameter; None if nothing is wrapped."""
        # Weak: otherwise a model would stay in memory until the garbage collector finds the cycle. References to the
        # tensors themselves would keep `engine.to()` from swapping them.
        self._optimizer, self._trained = weakref.ref(optimizer), weakref.ref(trained)
        self._record: Callable[[], Any] = (lambda: None) if record is None else weakref.ref(record)

    @property
    def master(self) -> Any:
        """The master that the optimizer steps; None if it steps the parameter itself, or is gone."""
        trained = self._trained()
        return trained.master if trained is not None and trained.has_master else None

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the current step; this process's own if it is not reduced yet."""
        trained, record = self._trained(), self._record()
        owners = (trained.master, trained.param) if trained is not None else ()
        reduced = next((owner.grad for owner in owners if owner.grad is not None), None)
        return unreduced_gradient(record) if reduced is None and record is not None else reduced

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state of this parameter; empty before the first step."""
        optimizer, trained = self._optimizer(), self._trained()
        return optimizer.state.get(trained.master, {}) if optimizer is not None and trained is not None else {}

    def __reduce__(self) -> Any:
        return type(None), ()


def link_parameters(sharding: Sharding, optimizer: ZeroOptimizer) -> None:
    """Links the module's parameters, in the form that scripts see, to the optimizer that trains them."""
    trained = {entry.name: entry for entry in optimizer.parameters}
    records = {id(record.unsharded_param): record for record in fsdp_params(sharding.fsdp_modules())}
    for name, param in sharding.root.named_parameters():
        if name in trained:
            link = OptimizerLink(optimizer, trained[name], records.get(id(param)))
            param.ds_optimizer = link  # type: ignore[attr-defined]


@torch.no_grad()
def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """The value that the optimizer steps, in fp32."""
    master = _master(param)
    if master is None:
        return _copy(param).float()
    if isinstance(param, DTensor) == isinstance(master, DTensor):
        renew_masters([(local_tensor(param), local_tensor(master))])
    return _copy(master).float()


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the parameter, and its fp32 master, to `value`, which must be the same on every process."""
    master = _master(param)
    if master is not None:
        _assign(master, value)
    _assign(param, value)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient between `backward()` and `step()`, in fp32, or None.

    Below stage 2 it is this process's own until the backward pass that ends the accumulation. In fp16 it is multiplied
    by the loss scale.
    """
    grad = _grad(param)
    return None if grad is None else _copy(grad).float()


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the gradient that `safe_get_full_grad` returns; raises ValueError if there is none."""
    grad = _grad(param)
    if grad is None:
        raise ValueError("safe_set_full_grad(): the parameter has no gradient; call it between backward() and step()")
    _assign(grad, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """The optimizer's tensor `optim_state_key`, such as "exp_avg"; None for a parameter that is not trained.

    Raises:
        ValueError: the optimizer does not have this state, or not yet: the first step creates it.
    """
    return None if _link(param) is None else _copy(_state(param, optim_state_key))


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets the tensor that `safe_get_full_optimizer_state` returns."""
    _assign(_state(param, optim_state_key), value)


def _link(param: nn.Parameter) -> OptimizerLink | None:
    return getattr(param, "ds_optimizer", None)


def _master(param: nn.Parameter) -> torch.Tensor | None:
    link = _link(param)
    return None if link is None else link.master


def _grad(param: nn.Parameter) -> torch.Tensor | None:
    link = _link(param)
    return param.grad if link is None else link.grad


def _state(param: nn.Parameter, key: str) -> torch.Tensor:
    link = _link(param)
    state = link.state if link is not None else {}
    if key not in state:
        raise ValueError(f"{key!r} is no state of this parameter's optimizer now; it has {', '.join(state) or 'none'}")
    return state[key]


@torch.no_grad()
def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return full_tensor(tensor).clone()


@torch.no_grad()
def _assign(target: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(target, DTensor):
        value = value.to(target.device_mesh.device_type)
        value = local_tensor(distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None))
    local_tensor(target).copy_(value)
