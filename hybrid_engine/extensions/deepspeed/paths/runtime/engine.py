"""`deepspeed.runtime.engine`."""

from hybrid_engine.engine.deepspeed_engine import *
