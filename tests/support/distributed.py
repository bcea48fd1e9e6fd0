"""Runs a function on several gloo processes of this machine, for tests of what happens between ranks."""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import secrets
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

# Fresh processes are forks of one that has imported these and done nothing else: importing takes seconds each time.
multiprocessing.set_forkserver_preload(
    # The third is what tracing a module imports: seven tenths of a second.
    [
        "torch.distributed.fsdp",
        "transformers",
        "torch._functorch.aot_autograd",
        "peft",
        "hybrid_engine.engine.zero_engine",
    ]
)


def run_distributed(worker: Callable[..., Any], world_size: int, *args: Any, seconds: float = 120) -> list[Any]:
    """Calls `worker(rank, world_size, *args)` on `world_size` fresh processes and returns what each returned.

    The processes see torchrun's environment (RANK, WORLD_SIZE, ...) and share a gloo process group on 127.0.0.1.
    `worker` must be a module-level function (it is imported by name); results must be picklable by `torch.save`.
    An exception on any rank is raised here with that rank's traceback. A collective waits for `seconds` at most.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = (worker, world_size, free_port(), folder, args, seconds)
        try:
            mp.start_processes(_run, args=args, nprocs=world_size, start_method="forkserver")
        except mp.ProcessExitedException as error:
            error.add_note(_last_stacks(Path(folder)))
            raise
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def run_to_the_end(workers: list[tuple[Any, ...]], seconds: float) -> list[list[Any]]:
    """What each of two processes returned for each `(worker, *args)`; None for one that died. All run at once."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for number, (worker, *args) in enumerate(workers):
            port, own_folder = free_port(), Path(folder) / str(number)
            own_folder.mkdir()
            for rank in range(2):
                arguments = rank, worker, 2, port, str(own_folder), tuple(args), seconds
                started.append(context.Process(target=_run, args=arguments))
                started[-1].start()
        for process in started:
            process.join(300)
            assert process.exitcode is not None, "a process waits for another one for ever"
        files = [[Path(folder) / str(number) / f"{rank}.pt" for rank in range(2)] for number in range(len(workers))]
        return [[torch.load(f, weights_only=False) if f.exists() else None for f in pair] for pair in files]


def _last_stacks(folder: Path) -> str:
    """Where the threads of processes stood that a signal ended."""
    return "\n".join(f"{file.stem}:\n{file.read_text()}" for file in sorted(folder.glob("*.stack")))


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
    stacks = (Path(folder) / f"rank {rank}.stack").open("w")
    faulthandler.enable(stacks)
    torch.set_num_threads(1)
    gc.freeze()  # half a million objects of imported modules, which each collection would search for a quarter second
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    try:
        torch.save(worker(rank, world_size, *args), Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def leave_process_group() -> None:
    """Ends a process group that an earlier test of this process may have left, as one of a single process is.

    DTensor keeps what it did on a mesh for all meshes that are equal to it, with the groups of the first.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()


def free_port() -> int:
    """One that nothing has, and below those that systems give to connections, which could take it meanwhile."""
    while True:
        port = secrets.randbelow(12000) + 20000
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port
