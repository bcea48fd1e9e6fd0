"""`deepspeed.moe.utils`."""

from hybrid_engine.extensions.deepspeed.optimizer_names import *
