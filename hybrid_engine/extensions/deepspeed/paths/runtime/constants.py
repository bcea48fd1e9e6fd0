"""`deepspeed.runtime.constants`."""

from hybrid_engine.extensions.deepspeed.runtime_names import *
