"""`deepspeed.utils.init_on_device`."""

from hybrid_engine.extensions.deepspeed.utils import *
