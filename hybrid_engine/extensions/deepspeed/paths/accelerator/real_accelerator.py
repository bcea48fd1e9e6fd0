"""`deepspeed.accelerator.real_accelerator`."""

from hybrid_engine.extensions.deepspeed.accelerator import *
