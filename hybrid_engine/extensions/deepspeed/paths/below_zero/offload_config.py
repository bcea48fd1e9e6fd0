"""`deepspeed.runtime.zero.offload_config`."""

from hybrid_engine.extensions.deepspeed.offload_config import *
