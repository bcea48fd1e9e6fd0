"""`deepspeed.checkpoint`."""

from pkgutil import extend_path

from hybrid_engine.checkpoint import *
from hybrid_engine.extensions.deepspeed.absent import attributes_of

__path__ = extend_path(__path__, "hybrid_engine.below_checkpoint")
__getattr__ = attributes_of(__name__)
