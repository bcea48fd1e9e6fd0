"""The state that an optimizer has before its first step, carried from the parameters to their masters.

`torch.optim.Adagrad` fills its state when it is built, which a script may do before `initialize()` shards the model.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` has state of steps; also if it has state and counts none."""
    return any(float(entry.get("step", 1)) != 0 for entry in optimizer.state.values())


@torch.no_grad()
def carry_state(optimizer: torch.optim.Optimizer, masters: dict[nn.Parameter, nn.Parameter]) -> None:
    """Gives the state of parameters to their masters, in the masters' dtype, place and shards; local.

    Args:
        optimizer: its groups hold the masters, its state still the parameters; that of others is dropped.
        masters: by parameter.
    """
    if not optimizer.state or all(param is master for param, master in masters.items()):
        return
    state = dict(optimizer.state)
    optimizer.state.clear()
    for param, entry in state.items():
        if param in masters:
            master = masters[param]
            optimizer.state[master] = {
                key: _shard(value, master) if _is_like(value, param) else value for key, value in entry.items()
            }
    optimizer.load_state_dict(optimizer.state_dict())  # casts and moves each entry as its optimizer wants it


def _is_like(value: Any, param: nn.Parameter) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape


def _shard(value: torch.Tensor, master: Any) -> torch.Tensor:
    if not isinstance(master, DTensor) or isinstance(value, DTensor):
        return value
    mesh = master.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, master.placements, src_data_rank=None)
