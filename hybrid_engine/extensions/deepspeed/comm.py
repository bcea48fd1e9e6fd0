"""`deepspeed.comm`: torch.distributed under DeepSpeed's names of arguments, also for a process without a group.

The collectives take DeepSpeed's arguments too: `tensor` is the input wherever there is one, and `prof`, `log_name` and
`debug`, which its profiler reads, mean nothing. Without a process group each does what it comes to for one process.
"""

import inspect
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, irecv, isend, recv, send

from hybrid_engine.distributed.groups import all_gather_single, reduce_scatter_single
from hybrid_engine.extensions.deepspeed.distributed import init_distributed
from hybrid_engine.generation.decode import drop_recorded_steps

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "init_distributed",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]

PROFILING = ("prof", "log_name", "debug")
"""Arguments of DeepSpeed's collectives that only its profiler reads."""


class Done:
    """The handle of a collective that had nothing to wait for."""

    def wait(self) -> bool:
        """Returns at once: the collective is done."""
        return True

    def is_completed(self) -> bool:
        """True: the collective is done."""
        return True


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


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The number among all processes of number `group_rank` in `group`."""
    return dist.get_global_rank(group, group_rank) if dist.is_initialized() and group is not None else group_rank


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The numbers among all processes of those in `group`."""
    return dist.get_process_group_ranks(group) if dist.is_initialized() else [0]


def new_group(ranks: list[int] | None = None) -> Any:
    """A group of some of the processes; None without a process group. Every process must call it."""
    return dist.new_group(ranks) if dist.is_initialized() else None


def destroy_process_group(group: Any = None) -> None:
    """Ends a group, or all of them, after the recorded steps that meet in them; nothing without a process group."""
    if dist.is_initialized():
        drop_recorded_steps()
        dist.destroy_process_group(group)


def has_all_gather_into_tensor() -> bool:
    """Whether there is such a collective: PyTorch has it."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """Whether there is such a collective: PyTorch has it."""
    return True


def _collective(function: Callable[..., Any], target: str = "", source: str = "") -> Callable[..., Any]:
    """`function` of torch.distributed with DeepSpeed's arguments.

    Args:
        function: the collective.
        target: the argument that one process alone copies into; empty when its tensor stays as it is.
        source: the argument that it copies from, DeepSpeed's `tensor` where that is PyTorch's name of the input.
    """
    signature = inspect.signature(function)
    is_renamed = "tensor" not in signature.parameters

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if name not in PROFILING}
        if is_renamed and "tensor" in given:
            given[source] = given.pop("tensor")
        if target == "output" and "output_tensor" in given:
            given["output"] = given.pop("output_tensor")
        if dist.is_initialized():
            return function(*args, **given)
        arguments = signature.bind(*args, **given).arguments
        if target:
            _copy(arguments[target], arguments[source])
        return Done() if arguments.get("async_op") else None

    return call


def _copy(target: Any, value: Any) -> None:
    """The part that the only process receives: its own, the first of a list."""
    value = value[0] if isinstance(value, list) else value
    if isinstance(target, torch.Tensor):
        target.copy_(value.view_as(target))
    elif isinstance(value, torch.Tensor):
        target[0].copy_(value)
    else:
        target[0] = value


barrier = _collective(dist.barrier)
monitored_barrier = _collective(dist.monitored_barrier)
all_reduce = _collective(dist.all_reduce)
inference_all_reduce = all_reduce
reduce = _collective(dist.reduce)
broadcast = _collective(dist.broadcast)
broadcast_object_list = _collective(dist.broadcast_object_list)
all_gather = _collective(dist.all_gather, "tensor_list", "tensor")
all_gather_object = _collective(dist.all_gather_object, "object_list", "obj")
all_gather_into_tensor = _collective(all_gather_single, "output_tensor", "input_tensor")
allgather_fn = all_gather_into_tensor
reduce_scatter = _collective(dist.reduce_scatter, "output", "input_list")
reduce_scatter_tensor = _collective(reduce_scatter_single, "output", "input")
reduce_scatter_fn = reduce_scatter_tensor
all_to_all = _collective(dist.all_to_all, "output_tensor_list", "input_tensor_list")
all_to_all_single = _collective(dist.all_to_all_single, "output", "input")
gather = _collective(dist.gather, "gather_list", "tensor")
scatter = _collective(dist.scatter, "tensor", "scatter_list")
