"""`deepspeed.runtime.config`."""

from hybrid_engine.extensions.deepspeed.config_names import *
