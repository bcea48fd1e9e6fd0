"""`deepspeed.runtime.fp16.unfused_optimizer`."""

from hybrid_engine.extensions.deepspeed.runtime_names import *
