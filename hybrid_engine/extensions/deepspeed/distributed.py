"""`deepspeed.init_distributed`."""

import os
from datetime import timedelta
from typing import Any

import torch

from hybrid_engine.distributed import processes
from hybrid_engine.distributed.processes import describe_process


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
