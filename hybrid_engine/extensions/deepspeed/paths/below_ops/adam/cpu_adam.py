"""`deepspeed.ops.adam.cpu_adam`."""

from hybrid_engine.ops.fused_adam import *
