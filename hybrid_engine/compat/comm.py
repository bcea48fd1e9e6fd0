"""`deepspeed.comm`: torch.distributed, whose functions also answer in a single process without a process group."""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from hybrid_engine.compat.distributed import init_distributed

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "init_distributed",
    "is_available",
    "is_initialized",
    "new_group",
    "reduce",
    "reduce_scatter_tensor",
]


def is_available() -> bool:
    """Whether this build of PyTorch has torch.distributed."""
    return dist.is_available()


def is_initialized() -> bool:
    """Whether there is a process group."""
    return dist.is_initialized()


def get_rank(group: Any = None) -> int:
    """This process's number in `group`; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """Processes in `group`; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    """This process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    """The group of all processes; None without a process group."""
    return dist.group.WORLD if dist.is_initialized() else None


def get_global_rank(group: Any, group_rank: int) -> int:
    """The number among all processes of number `group_rank` in `group`."""
    return dist.get_global_rank(group, group_rank) if dist.is_initialized() else group_rank


def new_group(ranks: list[int] | None = None) -> Any:
    """A group of some of the processes; None without a process group. Every process must call it."""
    return dist.new_group(ranks) if dist.is_initialized() else None


def _or_alone(collective: Callable[..., Any], alone: Callable[..., Any]) -> Callable[..., Any]:
    """`collective`, or without a process group what it comes to for one process."""

    @wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        return collective(*args, **kwargs) if dist.is_initialized() else alone(*args, **kwargs)

    return call


def _copy_whole(output: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    output.copy_(tensor.view_as(output))


def _copy_first(outputs: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(value, torch.Tensor):
        outputs[0].copy_(value)
    else:
        outputs[0] = value


def _leave(*args: Any, **kwargs: Any) -> None:
    """What a reduction or a broadcast over one process does to its tensor."""


barrier = _or_alone(dist.barrier, _leave)
all_reduce = _or_alone(dist.all_reduce, _leave)
reduce = _or_alone(dist.reduce, _leave)
broadcast = _or_alone(dist.broadcast, _leave)
broadcast_object_list = _or_alone(dist.broadcast_object_list, _leave)
all_gather = _or_alone(dist.all_gather, _copy_first)
all_gather_object = _or_alone(dist.all_gather_object, _copy_first)
all_gather_into_tensor = _or_alone(dist.all_gather_into_tensor, _copy_whole)
reduce_scatter_tensor = _or_alone(dist.reduce_scatter_tensor, _copy_whole)
destroy_process_group = _or_alone(dist.destroy_process_group, _leave)
