"""ZeRO on FSDP2: sharding, gathering, and models that are sharded while they are built."""

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
"""DeepSpeed's name for it where `mics_shard_size` is set, which `Init` reads."""

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
