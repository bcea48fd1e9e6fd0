"""`deepspeed.ops.adagrad`."""

from hybrid_engine.extensions.deepspeed.runtime_names import *
