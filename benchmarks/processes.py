"""Fresh processes for benchmarks: what one process did before would show in the memory of the next."""

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_fresh(
    worker: Callable[..., Any], num_processes: int, device: str, threads: int | None, *args: Any
) -> list[Any]:
    """What `worker(*args)` returned on each of `num_processes` new processes of this machine, by rank.

    One process has no process group; several share one, of gloo on the CPU and of nccl, a GPU each, on CUDA.

    Args:
        worker: a function at the top of a file. What it imports is imported once for all calls, unless that file is
            the script.
        num_processes: how many.
        device: "cpu" or "cuda".
        threads: of torch in each; None shares the CPUs among them.
        *args: what is sent to `worker`, picklable like its result.
    """
    mp.get_context("forkserver").set_forkserver_preload([worker.__module__])
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        given = (num_processes, device, threads, port, folder, worker, args)
        mp.start_processes(_run, args=given, nprocs=num_processes, start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(num_processes)]


def _run(
    rank: int,
    num_processes: int,
    device: str,
    threads: int | None,
    port: int,
    folder: str,
    worker: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(threads or max(1, torch.get_num_threads() // num_processes))
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.cuda.init()  # its memory is counted from here on
    if num_processes > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        torch.save(worker(*args), Path(folder) / f"{rank}.pt")
        if num_processes > 1:
            dist.barrier()
    finally:
        if num_processes > 1:
            dist.destroy_process_group()
