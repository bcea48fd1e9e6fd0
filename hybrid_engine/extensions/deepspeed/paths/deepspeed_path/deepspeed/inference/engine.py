"""`deepspeed.inference.engine`."""

from hybrid_engine.inference.engine import *
