"""`deepspeed.checkpoint.universal_checkpoint` is absent; its names say what to use."""

from hybrid_engine.extensions.deepspeed.absent import attributes_of

__getattr__ = attributes_of(__name__)
