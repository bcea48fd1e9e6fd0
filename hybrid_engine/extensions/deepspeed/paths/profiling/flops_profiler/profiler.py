"""`deepspeed.profiling.flops_profiler.profiler`."""

from hybrid_engine.extensions.deepspeed.flops_profiler import *
