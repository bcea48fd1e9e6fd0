"""`deepspeed.runtime.fp16`, which only holds other modules."""

from hybrid_engine.extensions.deepspeed.absent import attributes_of

__getattr__ = attributes_of(__name__)
