"""`deepspeed.utils.groups`; code reads its private names too."""

from hybrid_engine.extensions.deepspeed.absent import attributes_of
from hybrid_engine.extensions.deepspeed.comm import *
from hybrid_engine.extensions.deepspeed.comm import (
    _get_data_parallel_group,
    _get_data_parallel_group_ranks,
    _get_data_parallel_rank,
    _get_data_parallel_world_size,
    _get_model_parallel_group,
    _get_model_parallel_rank,
    _get_model_parallel_world_size,
    _get_sequence_data_parallel_group,
    _get_sequence_data_parallel_rank,
    _get_sequence_data_parallel_world_size,
    _get_sequence_parallel_group,
    _get_sequence_parallel_rank,
    _get_sequence_parallel_world_size,
    _get_world_group,
)

__getattr__ = attributes_of(__name__)
