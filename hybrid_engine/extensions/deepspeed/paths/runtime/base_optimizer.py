"""`deepspeed.runtime.base_optimizer`."""

from hybrid_engine.extensions.deepspeed.optimizer_names import *
