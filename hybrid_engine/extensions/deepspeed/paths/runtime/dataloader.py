"""`deepspeed.runtime.dataloader`."""

from hybrid_engine.extensions.deepspeed.utils import *
