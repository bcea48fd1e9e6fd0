"""`deepspeed.runtime.zero.offload_config`."""

from hybrid_engine.extensions.deepspeed.utils import *
