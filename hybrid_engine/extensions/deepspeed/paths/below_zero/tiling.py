"""`deepspeed.runtime.zero.tiling`."""

from hybrid_engine.zero.tiled_linear import *
