"""`deepspeed.runtime.zero.partition_parameters`: a parameter's place, and how to make it whole."""

from hybrid_engine.zero.gathered_parameters import GatheredParameters, ZeroParamStatus

__all__ = ["GatheredParameters", "ZeroParamStatus"]
