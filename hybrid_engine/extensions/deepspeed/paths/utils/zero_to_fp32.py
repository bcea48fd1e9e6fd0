"""`deepspeed.utils.zero_to_fp32`."""

from hybrid_engine.extensions.deepspeed.absent import attributes_of
from hybrid_engine.extensions.deepspeed.zero_to_fp32 import *

__getattr__ = attributes_of(__name__)
