"""Which process this is, read from the environment of torchrun, MPI or SLURM."""

import re
from collections.abc import Mapping

# Rank, world size and local rank, as Open MPI, MPICH with Intel MPI, and MVAPICH name them.
MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
)
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")


def describe_process(environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would have set and is missing: RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR.

    torchrun's own variables come first, then MPI's, then those of a SLURM step (`srun`). A batch script that SLURM
    starts without `srun` is a single process, whatever the size of its allocation.

    Args:
        environment: os.environ.

    Returns:
        Variables to add; none where torchrun set them or nothing names several processes.

    Raises:
        ValueError: MPI started processes on several machines and MASTER_ADDR is not set.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return {}
    found = _from_mpi(environment) or _from_slurm(environment)
    return {name: value for name, value in found.items() if name not in environment}


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
