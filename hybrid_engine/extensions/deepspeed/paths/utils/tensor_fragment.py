"""`deepspeed.utils.tensor_fragment`."""

from hybrid_engine.extensions.deepspeed.utils import *
