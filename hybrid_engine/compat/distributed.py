"""`deepspeed.init_distributed`."""

import os
from datetime import timedelta
from typing import Any

import torch

from hybrid_engine.zero import processes
from hybrid_engine.zero.environment import describe_process


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
        dist_init_required: False joins nothing.

    Raises:
        ValueError: for an `init_method` but "env://", and a `rank` or `world_size` that is not the environment's;
            without one that of a process alone.
    """
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    known = {**alone, **os.environ, **describe_process(os.environ)}
    asked = {name: number for name, number in (("RANK", rank), ("WORLD_SIZE", world_size)) if number >= 0}
    if init_method not in (None, "env://") or any(known.get(name) != str(number) for name, number in asked.items()):
        raise ValueError(
            f"{init_method=}, {rank=}, {world_size=}: the environment (RANK, WORLD_SIZE, MASTER_ADDR, ...) says "
            f"how processes meet; set it, or call torch.distributed.init_process_group() before"
        )
    if dist_init_required is False:
        return
    # With gloo besides, which parameters offloaded to the CPU need.
    backend = None if dist_backend == "nccl" and not torch.cuda.is_available() else dist_backend
    processes.init_distributed(distributed_port, "cpu:gloo,cuda:nccl" if backend == "nccl" else backend, timeout)
    processes.join_alone()
