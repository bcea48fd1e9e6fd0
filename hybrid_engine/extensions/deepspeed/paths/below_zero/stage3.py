"""`deepspeed.runtime.zero.stage3`."""

from hybrid_engine.extensions.deepspeed.absent import attributes_of
from hybrid_engine.extensions.deepspeed.stage3_names import *

__getattr__ = attributes_of(__name__)
