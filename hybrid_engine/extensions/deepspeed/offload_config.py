"""`deepspeed.runtime.zero.offload_config`: the names that `engine.offload_states()` takes."""

from enum import Enum

from hybrid_engine.optim.state_offload import OffloadStateTypeEnum

__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum"]


class OffloadDeviceEnum(str, Enum):
    """Where to; `offload_states()` goes to the CPU alone."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"
