"""`deepspeed.utils.nvtx`."""

from hybrid_engine.extensions.deepspeed.utils import *
