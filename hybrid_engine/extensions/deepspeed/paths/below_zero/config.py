"""`deepspeed.runtime.zero.config`."""

from hybrid_engine.extensions.deepspeed.config_names import *
