"""`deepspeed.runtime.rollout.base`."""

from hybrid_engine.extensions.deepspeed.rollout import *
