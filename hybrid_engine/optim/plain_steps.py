"""Steps of optimizers whose operations torch cannot shard, on plain tensors instead of DTensors.

An optimizer over DTensors computes the same as on one process, or torch raises: it has no sharded form of fused SGD and
Adagrad, nor of some operations of Rprop, Adafactor and Muon. Among these,
- elementwise optimizers step this process's shards;
- Adafactor and Muon, which need whole tensors, step one parameter at a time, gathered with its gradient and its state,
  on every process; where a shard is the whole, as at stage 0, they step the shard. The parameters that AdamW steps in a
  `MuonWithAdamW` are stepped as shards.

`param_groups` and the keys of `state` are the DTensors again after a step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hybrid_engine.zero.sharding import full_tensor, local_tensor

WHOLE_TENSORS = ("Adafactor", "Muon", "MuonWithAdamW")
"""Class names of optimizers that need whole tensors, of torch.optim or others."""
NO_SHARDED_FORM = ("Sharding propagation failed", "sharding strategy", "mixed torch.Tensor and DTensor")
"""Text of torch's errors for an operation without a sharded form."""


Plain = Callable[[torch.Tensor], torch.Tensor]
"""Replaces a DTensor by a plain tensor: this process's shard, or the whole."""


def step(optimizer: torch.optim.Optimizer) -> None:
    """One step of `optimizer`; collective if its parameters are DTensors.

    Raises:
        ValueError: torch has no sharded form of its operations.
    """
    masters = [param for group in optimizer.param_groups for param in group["params"] if isinstance(param, DTensor)]
    if _steps_shards(optimizer, masters):
        _step_plain(optimizer, masters, local_tensor)
    elif masters and keeps_wholes(optimizer):
        by_number = _stepped_by_adamw(optimizer)
        if by_number:
            _step_plain(optimizer, by_number, local_tensor)
        for master in masters:
            if master.grad is not None and not any(master is other for other in by_number):
                _step_plain(optimizer, [master], _whole)
    else:
        _step_sharded(optimizer)
        return
    if any(not isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"]):
        _step_others(optimizer)


def keeps_wholes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state of another shape than the parameter, such as Adafactor's of rows, is whole on every process."""
    return type(optimizer).__name__ in WHOLE_TENSORS


def _stepped_by_adamw(optimizer: torch.optim.Optimizer) -> list[Any]:
    groups = [group for group in optimizer.param_groups if group.get("use_muon") is False]
    return [param for group in groups for param in group["params"] if isinstance(param, DTensor)]


def _step_others(optimizer: torch.optim.Optimizer) -> None:
    kept = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [param for param in group["params"] if not isinstance(param, DTensor)]
    try:
        optimizer.step()
    finally:
        for group, params in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = params


def _steps_shards(optimizer: torch.optim.Optimizer, masters: list[Any]) -> bool:
    """Whether stepping this process's shards equals stepping the whole, and torch has no sharded form of the step."""
    if not masters:
        return False
    if keeps_wholes(optimizer):
        return all(_is_whole(master) for master in masters)
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    kinds = (torch.optim.Rprop, torch.optim.SGD, torch.optim.Adagrad) if is_fused else (torch.optim.Rprop,)
    return type(optimizer) in kinds  # not a subclass of them, whose step may be another


def _is_whole(master: Any) -> bool:
    sizes = zip(master.device_mesh.shape, master.placements, strict=True)
    return all(size == 1 or placement.is_replicate() for size, placement in sizes)


def _step_sharded(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.step()
    except (NotImplementedError, RuntimeError) as error:
        if not any(words in str(error) for words in NO_SHARDED_FORM):
            raise
        raise ValueError(
            f"optimizer={type(optimizer).__name__} cannot step sharded parameters, torch has no sharded form of what "
            f"it does ({str(error).splitlines()[0]}); train on one process, or with another optimizer, such as AdamW"
        ) from error


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on the device of its shard: an offloaded one is in CPU memory."""
    return full_tensor(tensor).to(tensor.device)


def _step_plain(optimizer: torch.optim.Optimizer, masters: list[Any], plain: Plain) -> None:
    """Steps plain parameters with the optimizer's state of `masters`, and writes the results back to those."""
    stands = {master: _stand(optimizer, master, plain) for master in masters}
    kept = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [stands[param] for param in group["params"] if param in stands]
    try:
        optimizer.step()
    finally:
        for group, params in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = params
        for master, stand in stands.items():
            _keep(master, stand)
            for key, value in optimizer.state.pop(stand, {}).items():
                _keep_state(optimizer.state[master], key, value, master, stand)


def _stand(optimizer: torch.optim.Optimizer, master: Any, plain: Plain) -> nn.Parameter:
    """The plain parameter that replaces `master`, with its gradient and its state."""
    stand = nn.Parameter(plain(master), requires_grad=master.requires_grad)
    stand.grad = None if master.grad is None else plain(master.grad)
    if master in optimizer.state:
        state = optimizer.state[master]
        optimizer.state[stand] = {key: plain(v) if isinstance(v, DTensor) else v for key, v in state.items()}
    return stand


def _keep_state(state: dict[str, Any], key: str, value: Any, master: Any, stand: nn.Parameter) -> None:
    """Stores one entry: sharded like the parameter if it has its size, otherwise as each process's own value.

    An entry of a parameter without a dimension is each process's own too, as a step count has the same size.
    """
    is_sharded = isinstance(state.get(key), DTensor)
    if not isinstance(value, torch.Tensor) or value.shape != stand.shape or not (master.dim() or is_sharded):
        state[key] = value
        return
    if not is_sharded:
        state[key] = torch.zeros_like(master, dtype=value.dtype)
    _keep(state[key], value)


def _keep(target: Any, value: torch.Tensor) -> None:
    """Copies values, this process's or whole ones, to a DTensor; does nothing if it shares their memory."""
    shard = local_tensor(target)
    if value.shape == target.shape != shard.shape:
        mesh = target.device_mesh
        whole = value.detach().to(mesh.device_type)
        value = local_tensor(distribute_tensor(whole, mesh, target.placements, src_data_rank=None))
    if value.data_ptr() != shard.data_ptr():
        shard.copy_(value)
