"""`deepspeed.runtime.rollout.hybrid_engine_rollout`."""

from hybrid_engine.extensions.deepspeed.rollout import *
