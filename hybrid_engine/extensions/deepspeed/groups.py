"""`deepspeed.utils.groups`: which processes train together. All of them are one data parallel group.

Of every kind of model parallelism there is one process to a group: this one alone.
"""

from functools import cache
from typing import Any

import torch.distributed as dist

from hybrid_engine.distributed.processes import get_rank, get_world_size

mpu = None
mesh_device = None
expert_tensor_parallel_world_size = 1


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
