"""`deepspeed.utils.z3_leaf_module`."""

from hybrid_engine.extensions.deepspeed.utils import *
