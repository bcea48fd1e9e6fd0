"""`deepspeed.runtime.engine` and `deepspeed.runtime.hybrid_engine`: the engines under DeepSpeed's names."""

from hybrid_engine.engine import ZeroEngine as DeepSpeedEngine
from hybrid_engine.hybrid import HybridEngine as DeepSpeedHybridEngine

__all__ = ["DeepSpeedEngine", "DeepSpeedHybridEngine"]
