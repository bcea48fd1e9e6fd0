"""`deepspeed.checkpoint.utils`."""

from hybrid_engine.extensions.deepspeed.utils import *
