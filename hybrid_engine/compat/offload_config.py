"""`deepspeed.runtime.zero.offload_config`: the names that `engine.offload_states()` takes."""

from enum import Enum


class OffloadDeviceEnum(str, Enum):
    """Where to; `offload_states()` goes to the CPU alone."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """What an engine keeps between two steps."""

    optim_states = "optim_states"
    """The optimizer's state, such as Adam's moments."""
    hp_params = "hp_params"
    """The fp32 masters of parameters in 16 bits."""
    lp_params = "lp_params"
    """The parameters, or this process's shards."""
    lp_grads = "lp_grads"
    """Gradients that wait for the step."""
    contiguous_grad_buffer = "contiguous_grad_buffer"
    """Nothing here: FSDP2 keeps no buffer for gradients."""
