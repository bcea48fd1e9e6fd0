"""ZeRO on FSDP2: sharding, gathering, the optimizer shim, loss scaling and learning-rate schedules."""

from hybrid_engine.zero.external_parameters import register_external_parameter, unregister_external_parameter
from hybrid_engine.zero.gathered_parameters import GatheredParameters
from hybrid_engine.zero.init import Init

__all__ = ["GatheredParameters", "Init", "register_external_parameter", "unregister_external_parameter"]
