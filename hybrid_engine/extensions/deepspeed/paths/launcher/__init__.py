"""`deepspeed.launcher`."""

from hybrid_engine.extensions.deepspeed.absent import attributes_of
from hybrid_engine.extensions.deepspeed.comm import *

__getattr__ = attributes_of(__name__)
