"""`deepspeed.runtime.zero.utils`."""

from hybrid_engine.extensions.deepspeed.utils import *
