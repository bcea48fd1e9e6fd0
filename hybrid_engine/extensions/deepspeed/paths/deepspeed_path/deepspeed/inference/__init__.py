"""`deepspeed.inference`."""

from pkgutil import extend_path

from hybrid_engine.extensions.deepspeed.absent import attributes_of
from hybrid_engine.inference import *

__path__ = extend_path(__path__, "hybrid_engine.below_inference")
__getattr__ = attributes_of(__name__)
