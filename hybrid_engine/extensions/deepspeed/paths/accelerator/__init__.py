"""`deepspeed.accelerator`."""

from hybrid_engine.extensions.deepspeed.absent import attributes_of
from hybrid_engine.extensions.deepspeed.accelerator import *

__getattr__ = attributes_of(__name__)
