"""`deepspeed.runtime.zero.utils`."""

from hybrid_engine.extensions.deepspeed.partition_parameters import *
