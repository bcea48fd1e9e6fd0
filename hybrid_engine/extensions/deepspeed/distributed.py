"""How processes meet: `deepspeed.init_distributed`, `utils.groups`, `launcher.runner`, `add_config_arguments`.

All processes are one data parallel group. Of every kind of model parallelism there is one process to a group: this one
alone.
"""

import argparse
import importlib
import os
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.distributed import processes
from hybrid_engine.distributed.processes import describe_process, get_rank, get_world_size

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
mpu = None
mesh_device = None
expert_tensor_parallel_world_size = 1


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
    return get_world_size()


def get_data_parallel_rank() -> int:
    """This process's number."""
    return get_rank()


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
    return get_rank()


@cache
def _alone() -> Any:
    # Nobody else comes to this call.
    return dist.new_group([get_rank()], use_local_synchronization=True)


def _get_data_parallel_group_ranks() -> list[int]:
    return list(range(get_world_size()))


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
