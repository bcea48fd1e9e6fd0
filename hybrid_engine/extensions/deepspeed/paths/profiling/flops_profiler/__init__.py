"""`deepspeed.profiling.flops_profiler`."""

from hybrid_engine.extensions.deepspeed.absent import attributes_of
from hybrid_engine.extensions.deepspeed.flops_profiler import *

__getattr__ = attributes_of(__name__)
