"""`deepspeed.ops.lamb.fused_lamb`."""

from hybrid_engine.ops.fused_lamb import *
