"""ZeRO on FSDP2: sharding, gathering, and models that are sharded while they are built."""

from pkgutil import extend_path

from hybrid_engine.lazy import lazy_attributes
from hybrid_engine.zero.gathered_parameters import (
    GatheredParameters,
    ZeroParamStatus,
    register_external_parameter,
    unregister_external_parameter,
    unwrap_model_for_generation,
)
from hybrid_engine.zero.init import Init
from hybrid_engine.zero.tiled_linear import TiledLinear, TiledLinearReturnBias

MiCS_Init = Init
"""DeepSpeed's name for `Init` with `mics_shard_size`, which `Init` reads from the config."""

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]

# DeepSpeed has modules below this path too: thin files of an extension, imported when they are read.
__path__ = extend_path(__path__, "hybrid_engine.below_zero")
__getattr__ = lazy_attributes(__name__)
