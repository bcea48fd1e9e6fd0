"""The rank and device of this process, how processes join a group, and helpers that run something on all of them.

`initialize()` and `init_inference()` call `init_distributed`, which reads what the launcher has set in the environment.
"""

import atexit
import logging
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hybrid_engine.config.notices import say_once
from hybrid_engine.distributed.groups import host_group
from hybrid_engine.distributed.verdict import attempt, watch_processes
from hybrid_engine.ops.gpu import foreign_memory_line, kernel_problem, why_no_gpu

logger = logging.getLogger("hybrid_engine")
Result = TypeVar("Result")
SECONDS_TO_FINISH = 0.1
FIRST_AFTER = 5.0
"""Seconds until the first line; each further line comes at twice the time of the one before."""
NOTE = "hybrid_engine/came"
MOST_RANKS = 20
"""Maximum number of ranks named in a line."""
# Rank, world size and local rank under the names of Open MPI, of MPICH with Intel MPI, and of MVAPICH.
MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
)
LEAST = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}
"""Minimum value of each numeric variable of torchrun."""
MAX_PORT = 65535
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")


def init_distributed(
    port: int = 29500, backend: str | None = None, timeout: timedelta | None = None, init_method: str | None = None
) -> None:
    """Joins the process group that the environment of torchrun, MPI or SLURM describes, unless it has joined already.

    Without such an environment, or with one process, there is nothing to join and no process group is made.

    Args:
        port: where to meet when MASTER_PORT is not set.
        backend: of torch.distributed; None chooses by the device.
        timeout: of collectives; None is PyTorch's.
        init_method: where to meet instead, "tcp://host:port" or "file:///path".

    Raises:
        ValueError: as `check_gpu` does.
    """
    os.environ.update(describe_process(os.environ))
    check_gpu()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    _let_threads_finish_at_exit()
    if torch.cuda.is_available():
        # Collectives of objects use the current device, also in a group that the caller made.
        torch.cuda.set_device(default_device())
    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(port))
        with announcing(os.environ, init_method):
            _join(backend, timeout, init_method)
    watch_processes()


def _join(backend: str | None, timeout: timedelta | None, init_method: str | None) -> None:
    if torch.cuda.is_available():
        # gloo in addition, for tensors that are offloaded to the CPU.
        backend, device = backend or "cpu:gloo,cuda:nccl", default_device()
        dist.init_process_group(backend, device_id=device, timeout=timeout, **_meeting_place(init_method))
    else:
        dist.init_process_group(backend or "gloo", timeout=timeout, **_meeting_place(init_method))


def _meeting_place(init_method: str | None) -> dict[str, Any]:
    if init_method is None:
        return {}
    return {"init_method": init_method, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}


def join_alone() -> None:
    """Makes a process group of this process alone, if there is none."""
    if not dist.is_initialized():
        _let_threads_finish_at_exit()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@cache
def _let_threads_finish_at_exit() -> None:
    """Sleeps before Python exits, so that gloo's threads can get the interpreter lock to release tensors.

    A thread that asks for the lock later aborts the process: this ended 7 of 40 runs on a busy machine whose last line
    was a collective. `destroy_process_group` does not help: it does not wait for threads of a group that a device mesh
    holds.
    """
    atexit.register(time.sleep, SECONDS_TO_FINISH)


def get_world_size() -> int:
    """Number of processes that train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_processes() -> dist.ProcessGroup | None:
    """The group of all processes; None if this process has not joined one."""
    return dist.group.WORLD if dist.is_initialized() else None


def get_rank() -> int:
    """This process's number, from 0; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def default_device() -> torch.device:
    """This process's GPU, or the CPU on a machine without one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


def check_gpu() -> None:
    """Checks that this process can use its GPU, before anything is allocated on it; local.

    Raises:
        ValueError: the machine has no GPU for this process, or kernels cannot run on it.
    """
    device = default_device()
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if device.index >= count:
            raise ValueError(
                f"LOCAL_RANK={device.index} must be below the {count} GPUs seen here; start {count} processes"
            )
        if problem := kernel_problem(device):
            raise ValueError(problem)
    say_what_limits(device)


def say_what_limits(device: torch.device) -> None:
    """Logs once why there is no GPU where one might be, or how much of its memory other processes hold; local."""
    if device.type == "cpu" and (reason := why_no_gpu()):
        say_once(f"computing on the CPU: {reason}")
    if device.type == "cuda":
        _say_foreign_memory(device)


@cache
def _say_foreign_memory(device: torch.device) -> None:
    """Logs it on every rank, each of which has another GPU.

    Once: later this process itself holds memory that PyTorch does not count (`containers/device.py`).
    """
    if line := foreign_memory_line(device):
        logger.warning("%s", line)


def on_rank_zero(action: Callable[[], Result]) -> Result:
    """Runs `action` on rank 0 and returns its result, or raises its error, on every process; collective.

    The result must be picklable.
    """
    if get_world_size() == 1:
        return action()
    outcome: list[Any] = [None, None]
    if get_rank() == 0:
        result, error = attempt(action)
        outcome = [result, None if error is None else _portable(error)]
    dist.broadcast_object_list(outcome, src=0, group=host_group())
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _portable(error: BaseException) -> BaseException:
    """`error`, or a RuntimeError with its text if it cannot be pickled, as with error classes of several arguments."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def gather_objects(value: Result) -> list[Result]:
    """The `value` of every process, in the order of ranks, on every process; collective."""
    if get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * get_world_size()
    dist.all_gather_object(values, value, group=host_group())
    return values


def check_same_architecture(module: nn.Module, every: int = 1) -> None:
    """Raises ValueError on every process unless all have parameters of the same names and shapes; collective.

    `every` consecutive processes hold one pipeline stage each. Each process is compared with those of the same stage.
    """
    found = gather_objects([(name, tuple(param.shape)) for name, param in module.named_parameters()])
    for rank, other in enumerate(found):
        first = get_rank() if every == 1 else rank % every
        if other != found[first]:
            raise ValueError(
                f"model: the parameters of rank {rank} are not those of rank {first} ({len(other)} and "
                f"{len(found[first])}, or other names or shapes); build the same architecture on every process"
            )


@torch.no_grad()
def broadcast_module(module: nn.Module) -> None:
    """Gives every process rank 0's parameters and buffers, as processes may have initialized them differently.

    Buffers on the meta device, which are not filled yet, stay as they are.
    """
    if get_world_size() == 1:
        return
    for tensor in [*module.parameters(), *(buffer for buffer in module.buffers() if not buffer.is_meta)]:
        if isinstance(tensor, DTensor):  # built under zero.Init, from rank 0's values
            continue
        sent = tensor.data.to(default_device())  # nccl does not reach tensors that are offloaded
        dist.broadcast(sent, src=0)
        if sent.device != tensor.device:
            tensor.data.copy_(sent)


@contextmanager
def announcing(environment: Mapping[str, str], init_method: str | None = None) -> Iterator[None]:
    """If the block takes longer than `FIRST_AFTER`, prints to stderr which processes are missing.

    Args:
        environment: RANK and WORLD_SIZE; without an `init_method` also MASTER_ADDR and MASTER_PORT.
        init_method: where they meet instead. A file cannot show who has come: notes in it would be counted as
            processes.
    """
    ended = threading.Event()
    meeting = _Meeting(int(environment["RANK"]), int(environment["WORLD_SIZE"]), *_place(environment, init_method))
    thread = threading.Thread(target=_announce, args=(meeting, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # a connection under way as Python ends would abort the process


def _place(environment: Mapping[str, str], init_method: str | None) -> tuple[str, tuple[str, int] | None]:
    """The name of the meeting place, and the host and port of its store, or None if it has no store."""
    if init_method is None:
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        return f"{host}:{port}", (host, port)
    url = urlsplit(init_method)
    if url.scheme == "tcp" and url.hostname and url.port:
        return init_method, (url.hostname, url.port)
    return init_method, None


@dataclass(frozen=True)
class _Meeting:
    rank: int
    world_size: int
    place: str
    store_address: tuple[str, int] | None

    def leave_note(self) -> dist.Store | None:
        """The store where the processes meet, after adding this process's note; None while it cannot be reached."""
        if self.store_address is None:
            return None
        try:
            timeout = timedelta(seconds=1)
            client = dist.TCPStore(*self.store_address, is_master=False, timeout=timeout, wait_for_workers=False)
            # A launcher's store outlives the processes, which the launcher may restart.
            store = dist.PrefixStore(f"{NOTE}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", client)
            store.set(str(self.rank), "")
        except (RuntimeError, ValueError):  # torch's errors of a store are RuntimeErrors
            return None
        return store

    def describe(self, store: dist.Store | None, seconds: float) -> str:
        """The text about this waiting process: where, for how many, and which processes are missing."""
        text = (
            f"rank {self.rank} has waited {seconds:.0f} s for WORLD_SIZE={self.world_size} processes to meet at "
            f"{self.place}"
        )
        if self.store_address is None:
            return f"{text}; are all of them started, with this init_method?"
        if store is None:
            return f"{text}; nobody answers there, where rank 0 should: is it started, and told this same place?"
        missing = [other for other in range(self.world_size) if not store.check([str(other)])]
        if not missing:
            return f"{text}; all have come and are connecting"
        return f"{text}; {self.world_size - len(missing)} have come, missing: rank {_ranks(missing)}"


def _announce(meeting: _Meeting, ended: threading.Event) -> None:
    start, next_line = time.monotonic(), FIRST_AFTER
    store = None
    while not ended.wait(FIRST_AFTER / 5):
        store = store or meeting.leave_note()
        waited = time.monotonic() - start
        if waited >= next_line and not ended.is_set():
            print(f"hybrid_engine: {meeting.describe(store, waited)}", file=sys.stderr, flush=True)
            next_line *= 2


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:MOST_RANKS]))
    return f"{shown}, ..." if len(ranks) > MOST_RANKS else shown


def describe_process(environment: Mapping[str, str]) -> dict[str, str]:
    """Values for those of torchrun's variables RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR that are missing.

    torchrun's own variables come first, then MPI's, then those of a SLURM step (`srun`). A batch script that SLURM
    starts without `srun` is a single process, whatever the size of its allocation.

    Args:
        environment: os.environ.

    Returns:
        Variables to add; empty if torchrun set them, or if the environment does not describe several processes.

    Raises:
        ValueError: MPI started processes on several machines and MASTER_ADDR is not set; or the variables contradict
            themselves.
    """
    found: dict[str, str] = {}
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        found = _from_mpi(environment) or _from_slurm(environment)
    added = {name: value for name, value in found.items() if name not in environment}
    check_process({**environment, **added})
    return added


def check_process(environment: Mapping[str, str]) -> None:
    """Raises ValueError if a rank, a size or a port is not a valid number, or contradicts the others."""
    numbers = {name: _number(name, environment[name], least) for name, least in LEAST.items() if name in environment}
    size, rank = numbers.get("WORLD_SIZE"), numbers.get("RANK")
    if rank is not None and size is None:
        raise ValueError(f"RANK={rank} is set and WORLD_SIZE is not; set both, or neither for a single process")
    if rank is None and size is not None and size > 1:
        raise ValueError(f"WORLD_SIZE={size} is set and RANK is not; set both, or neither for a single process")
    _check_below("RANK", rank, "WORLD_SIZE", size)
    _check_below("LOCAL_RANK", numbers.get("LOCAL_RANK"), "WORLD_SIZE", size)
    # LOCAL_WORLD_SIZE is not compared: accelerate sets it to 1 if it is not set.
    if numbers.get("MASTER_PORT", 0) > MAX_PORT:
        raise ValueError(f"MASTER_PORT={numbers['MASTER_PORT']} must be at most {MAX_PORT}; choose another port")
    if environment.get("MASTER_ADDR") == "":
        raise ValueError("MASTER_ADDR='' must be the address of rank 0's machine; set it, or unset it for 127.0.0.1")


def _number(name: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{name}={text!r} must be a whole number of at least {least}; set it right, or unset it")
    return int(text)


def _check_below(name: str, value: int | None, limit_name: str, limit: int | None) -> None:
    if value is not None and limit is not None and value >= limit:
        raise ValueError(
            f"{name}={value} must be below {limit_name}={limit}, as ranks count from 0; start the processes by a "
            f"launcher, or set both right"
        )


def _from_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    for rank, size, local_rank in MPI_NAMES:
        if rank in environment and size in environment:
            found = {
                "RANK": environment[rank],
                "WORLD_SIZE": environment[size],
                "LOCAL_RANK": environment.get(local_rank, environment[rank]),
            }
            return found | _mpi_address(environment, environment[size])
    return {}


def _mpi_address(environment: Mapping[str, str], size: str) -> dict[str, str]:
    if "MASTER_ADDR" in environment:
        return {}
    local_sizes = [environment[name] for name in LOCAL_SIZES if name in environment]
    if local_sizes and local_sizes[0] != size:
        raise ValueError(
            f"MPI started {size} processes on several machines and MASTER_ADDR is not set; set it to the machine of "
            f"rank 0, e.g. mpirun -x MASTER_ADDR=host"
        )
    return {"MASTER_ADDR": "127.0.0.1"}


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_PROCID" not in environment:
        return {}
    hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", ""))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": first_host(hosts) or "127.0.0.1",
    }


def first_host(nodelist: str) -> str:
    """The first host of SLURM's compact list: `gpu[03-05,9],login` begins with `gpu03`."""
    match = re.match(r"([^,\[]*)(?:\[([^\]]*)\])?", nodelist)
    assert match is not None, f"{nodelist=}"
    numbers = match.group(2)
    return match.group(1) + (re.split(r"[-,]", numbers)[0] if numbers else "")
