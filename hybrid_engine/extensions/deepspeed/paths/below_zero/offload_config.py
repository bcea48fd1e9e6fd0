"""`deepspeed.runtime.zero.offload_config`."""

from hybrid_engine.extensions.deepspeed.partitioned_parameters import *
