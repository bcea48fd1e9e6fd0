"""Runs a function on several gloo processes of this machine, for tests of what happens between ranks."""

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Fresh processes are forks of one that has imported these and done nothing else: importing takes seconds each time.
multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", "transformers", "peft", "hybrid_engine.engine"])


def run_distributed(worker: Callable[..., Any], world_size: int, *args: Any, seconds: float = 120) -> list[Any]:
    """Calls `worker(rank, world_size, *args)` on `world_size` fresh processes and returns what each returned.

    The processes see torchrun's environment (RANK, WORLD_SIZE, ...) and share a gloo process group on 127.0.0.1.
    `worker` must be a module-level function (it is imported by name); results must be picklable by `torch.save`.
    An exception on any rank is raised here with that rank's traceback. A collective waits for `seconds` at most.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = (worker, world_size, free_port(), folder, args, seconds)
        mp.start_processes(_run, args=args, nprocs=world_size, start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _run(
    rank: int,
    worker: Callable[..., Any],
    world_size: int,
    port: int,
    folder: str,
    args: tuple[Any, ...],
    seconds: float,
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        CUDA_VISIBLE_DEVICES="",
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    try:
        torch.save(worker(rank, world_size, *args), Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
