"""`deepspeed.runtime.zero.utils`."""

from hybrid_engine.extensions.deepspeed.partitioned_parameters import *
