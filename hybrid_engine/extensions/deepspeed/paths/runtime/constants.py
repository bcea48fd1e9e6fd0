"""`deepspeed.runtime.constants`."""

from hybrid_engine.extensions.deepspeed.config_names import *
