"""`deepspeed.utils.logging`."""

from hybrid_engine.extensions.deepspeed.utils import *
