"""`deepspeed.ops.adagrad`."""

from hybrid_engine.extensions.deepspeed.optimizer_names import *
