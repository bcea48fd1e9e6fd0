"""`deepspeed.runtime.activation_checkpointing.checkpointing`."""

from hybrid_engine.extensions.deepspeed.absent import attributes_of
from hybrid_engine.extensions.deepspeed.checkpointing import *

__getattr__ = attributes_of(__name__)
