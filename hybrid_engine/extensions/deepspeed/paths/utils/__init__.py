"""`deepspeed.utils`."""

import importlib

from hybrid_engine.extensions.deepspeed.absent import attributes_of

# This module and a function of it have one name, which means the function here, as in DeepSpeed.
importlib.import_module(f"{__name__}.z3_leaf_module")

from hybrid_engine.extensions.deepspeed.utils import *  # noqa: E402

__getattr__ = attributes_of(__name__)
