"""`deepspeed.runtime.zero.stage_1_and_2`."""

from hybrid_engine.extensions.deepspeed.absent import attributes_of
from hybrid_engine.extensions.deepspeed.stage3_names import *

__getattr__ = attributes_of(__name__)
