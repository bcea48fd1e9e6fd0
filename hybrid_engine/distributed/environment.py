"""Rank, world size and address of this process, read from the environment of torchrun, MPI or SLURM."""

import re
from collections.abc import Mapping

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
