"""`deepspeed.runtime.bf16_optimizer`."""

from hybrid_engine.extensions.deepspeed.optimizer_names import *
