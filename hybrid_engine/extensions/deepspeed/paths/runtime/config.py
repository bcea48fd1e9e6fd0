"""`deepspeed.runtime.config`."""

from hybrid_engine.extensions.deepspeed.runtime_names import *
