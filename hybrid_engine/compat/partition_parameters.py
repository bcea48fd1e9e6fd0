"""`deepspeed.runtime.zero.partition_parameters`: what scripts ask about a parameter's place."""

from enum import Enum


class ZeroParamStatus(Enum):
    """Whether a sharded parameter is whole in this process."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3
