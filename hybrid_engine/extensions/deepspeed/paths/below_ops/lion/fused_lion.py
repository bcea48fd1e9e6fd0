"""`deepspeed.ops.lion.fused_lion`."""

from hybrid_engine.ops.fused_lion import *
