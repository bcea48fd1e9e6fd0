"""`deepspeed.runtime.fp16.fused_optimizer`."""

from hybrid_engine.extensions.deepspeed.runtime_names import *
