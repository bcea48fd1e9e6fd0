"""`deepspeed.moe.utils`."""

from hybrid_engine.extensions.deepspeed.moe_utils import *
