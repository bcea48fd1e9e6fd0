"""`deepspeed.runtime.fp16.fused_optimizer`."""

from hybrid_engine.extensions.deepspeed.optimizer_names import *
