"""Runs a function on several processes of this machine, a GPU for each and NCCL between them."""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.distributed import free_port

# Where conftest.py notes which GPUs the tests were given, before it hides them from processes that tests start.
VISIBLE_GPUS = "TESTS_VISIBLE_GPUS"


def run_on_gpus(worker: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """What `run_distributed(worker, world_size, *args)` does, on GPUs."""
    hidden = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if VISIBLE_GPUS in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[VISIBLE_GPUS]
    try:
        with tempfile.TemporaryDirectory() as folder:
            # Not forks: the process that those would be forks of has seen no GPU.
            given = (worker, world_size, free_port(), folder, args)
            mp.start_processes(_run, args=given, nprocs=world_size, start_method="spawn")
            return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
    finally:
        if hidden is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = hidden


def _run(rank: int, worker: Callable[..., Any], world_size: int, port: int, folder: str, args: tuple[Any, ...]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=120), device_id=torch.device("cuda", rank))
    try:
        torch.save(worker(rank, world_size, *args), Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
