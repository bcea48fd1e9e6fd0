"""`deepspeed.ops.adam`."""

from hybrid_engine.extensions.deepspeed.absent import attributes_of
from hybrid_engine.ops.fused_adam import *

__getattr__ = attributes_of(__name__)
