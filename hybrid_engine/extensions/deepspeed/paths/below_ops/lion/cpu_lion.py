"""`deepspeed.ops.lion.cpu_lion`."""

from hybrid_engine.ops.fused_lion import *
