"""`deepspeed.ops.adam.fused_adam`."""

from hybrid_engine.ops.fused_adam import *
