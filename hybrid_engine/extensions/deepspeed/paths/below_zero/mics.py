"""`deepspeed.runtime.zero.mics`."""

from hybrid_engine.zero import *
