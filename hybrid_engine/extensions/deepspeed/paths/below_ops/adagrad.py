"""`deepspeed.ops.adagrad`."""

from hybrid_engine.extensions.deepspeed.adagrad import *
