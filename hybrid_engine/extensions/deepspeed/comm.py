"""`deepspeed.comm`: how processes meet, their groups, and torch.distributed under DeepSpeed's names of arguments.

Also `deepspeed.init_distributed`, `utils.groups`, `launcher.runner`, `add_config_arguments`. The collectives take
DeepSpeed's arguments too: `tensor` is the input wherever there is one, and `prof`, `log_name` and `debug`, which its
profiler reads, mean nothing. Without a process group each does what it comes to for one process.

All processes are one data parallel group. Of every kind of model parallelism there is one process to a group: this one
alone.
"""

import argparse
import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, irecv, isend, recv, send

from hybrid_engine.distributed import processes
from hybrid_engine.distributed.groups import all_gather_single, reduce_scatter_single
from hybrid_engine.distributed.processes import describe_process

PROFILING = ("prof", "log_name", "debug")
"""Arguments of DeepSpeed's collectives that only its profiler reads."""
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
mpu = None
mesh_device = None
expert_tensor_parallel_world_size = 1


__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "ReduceOp",
    "add_config_arguments",
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
    "dist",
    "expert_tensor_parallel_world_size",
    "gather",
    "get_all_ranks_from_group",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_global_rank",
    "get_local_rank",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_rank",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
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
    "main",
    "mesh_device",
    "monitored_barrier",
    "mpu",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]


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
        from hybrid_engine.generation.decode import (
            drop_recorded_steps,  # a process that only trains needs no generation
        )

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


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Joins the process group that the environment of torchrun, MPI or SLURM describes.

    A single process gets a group of its own: scripts go on with torch.distributed.get_rank() and barrier(). A group
    that exists already is kept. The arguments are DeepSpeed's, of which `auto_mpi_discovery`, `verbose` and `config`
    have no meaning here.

    Args:
        dist_backend: "nccl" or "gloo"; None, and "nccl" where there is no GPU, choose by the device.
        distributed_port: where to meet when MASTER_PORT is not set.
        timeout: of collectives; None is PyTorch's.
        init_method: where to meet: "env://" at MASTER_ADDR and MASTER_PORT, which is what None means, or
            "tcp://host:port" or "file:///path". `rank` and `world_size` then stand for an environment without them.
        dist_init_required: False joins nothing.

    Raises:
        ValueError: for another `init_method`; one but "env://" where neither the arguments nor the environment say
            which process of how many this is; a `rank` or `world_size` that is not the environment's, without one that
            of a process alone.
    """
    place = None if init_method == "env://" else init_method
    known = {**os.environ, **describe_process(os.environ)}
    asked = {name: str(number) for name, number in (("RANK", rank), ("WORLD_SIZE", world_size)) if number >= 0}
    if place is None:
        known = {"RANK": "0", "WORLD_SIZE": "1", **known}
    else:
        _check_place(place, known | asked)
    if any(known.get(name, number) != number for name, number in asked.items()):
        raise ValueError(
            f"{init_method=}, {rank=}, {world_size=}: the environment (RANK, WORLD_SIZE, MASTER_ADDR, ...) says "
            f"otherwise; set it, or call torch.distributed.init_process_group() before"
        )
    if dist_init_required is False:
        return
    if place is not None:
        _describe_process_as(known | asked)
    # With gloo besides, which parameters offloaded to the CPU need.
    backend = None if dist_backend == "nccl" and not torch.cuda.is_available() else dist_backend
    processes.init_distributed(distributed_port, "cpu:gloo,cuda:nccl" if backend == "nccl" else backend, timeout, place)
    processes.join_alone()


def _check_place(place: str, known: dict[str, str]) -> None:
    if not place.startswith(("tcp://", "file://")):
        raise ValueError(
            f'init_method={place!r} must be "env://", "tcp://host:port" or "file:///path"; pass one of them'
        )
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in known]
    if missing:
        raise ValueError(
            f"init_method={place!r} does not say which process this is: {' and '.join(missing)} is missing; pass rank= "
            f"and world_size=, or set the environment as torchrun does"
        )


def _describe_process_as(known: dict[str, str]) -> None:
    """Lets the environment say which process this is: that is where everything else looks."""
    os.environ.update(RANK=known["RANK"], WORLD_SIZE=known["WORLD_SIZE"])
    # As all processes of a machine have the first numbers on one machine, each gets a GPU of its own there.
    os.environ.setdefault("LOCAL_RANK", str(int(known["RANK"]) % max(1, torch.cuda.device_count())))


def main(args: Sequence[str] | None = None) -> int:
    """Starts a script as `hybrid-engine launch` does; returns its exit status."""
    status: int = importlib.import_module("hybrid_engine.cli.launcher").main(args)
    return status


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed`, `--deepspeed_config` and their old names to `parser`, and returns it.

    DeepSpeed's launcher passes `--local_rank` to every process; torchrun sets LOCAL_RANK instead, which becomes the
    default of that argument if the parser has it.
    """
    group = parser.add_argument_group("DeepSpeed", "configuration of the engine")
    group.add_argument("--deepspeed", action="store_true", help="train with the engine; for the script to read")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the config, a JSON file")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", type=str, default=None, help=argparse.SUPPRESS)
    has_local_rank = any(action.dest == "local_rank" for action in parser._actions)
    if has_local_rank and "LOCAL_RANK" in os.environ:
        parser.set_defaults(local_rank=int(os.environ["LOCAL_RANK"]))
    return parser


def get_data_parallel_group() -> Any:
    """All processes; None where there is no process group."""
    return dist.group.WORLD if dist.is_initialized() else None


def get_data_parallel_world_size() -> int:
    """The number of processes."""
    return processes.get_world_size()


def get_data_parallel_rank() -> int:
    """This process's number."""
    return processes.get_rank()


def get_tensor_model_parallel_group() -> Any:
    """This process alone; None where there is no process group."""
    return _alone() if dist.is_initialized() else None


def get_tensor_model_parallel_world_size() -> int:
    """1: training has no tensor parallelism."""
    return 1


def get_tensor_model_parallel_rank() -> int:
    """0: training has no tensor parallelism."""
    return 0


def get_tensor_model_parallel_src_rank() -> int:
    """This process's number: it is the first of its group."""
    return processes.get_rank()


@cache
def _alone() -> Any:
    # Nobody else comes to this call.
    return dist.new_group([processes.get_rank()], use_local_synchronization=True)


def _get_data_parallel_group_ranks() -> list[int]:
    return list(range(processes.get_world_size()))


get_model_parallel_group = get_tensor_model_parallel_group


get_model_parallel_world_size = get_tensor_model_parallel_world_size


get_model_parallel_rank = get_tensor_model_parallel_rank


# DeepSpeed's own names for clients: its names with an underscore are what public code calls.
_get_world_group = get_data_parallel_group


_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group


_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size


_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank


_get_model_parallel_group = _get_sequence_parallel_group = get_tensor_model_parallel_group


_get_model_parallel_world_size = _get_sequence_parallel_world_size = get_tensor_model_parallel_world_size


_get_model_parallel_rank = _get_sequence_parallel_rank = get_tensor_model_parallel_rank
