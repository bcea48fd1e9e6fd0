"""`deepspeed.runtime.hybrid_engine`."""

from hybrid_engine.engine.deepspeed_hybrid_engine import *
