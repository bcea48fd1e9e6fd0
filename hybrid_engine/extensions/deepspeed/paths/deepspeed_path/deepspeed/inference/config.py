"""`deepspeed.inference.config`."""

from hybrid_engine.inference.config import *
