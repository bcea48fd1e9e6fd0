"""`deepspeed.runtime.bf16_optimizer`."""

from hybrid_engine.extensions.deepspeed.runtime_names import *
