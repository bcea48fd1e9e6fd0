"""`deepspeed.runtime.zero.partition_parameters`."""

from hybrid_engine.extensions.deepspeed.absent import attributes_of
from hybrid_engine.extensions.deepspeed.utils import *

__getattr__ = attributes_of(__name__)
