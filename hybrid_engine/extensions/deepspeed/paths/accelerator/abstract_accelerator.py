"""`deepspeed.accelerator.abstract_accelerator`."""

from hybrid_engine.extensions.deepspeed.accelerator import *
