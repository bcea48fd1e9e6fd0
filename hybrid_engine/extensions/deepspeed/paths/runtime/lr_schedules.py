"""`deepspeed.runtime.lr_schedules`."""

from hybrid_engine.optim.lr_schedules import *
