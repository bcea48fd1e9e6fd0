"""`deepspeed.moe.utils`."""

from hybrid_engine.extensions.deepspeed.runtime_names import *
