"""`deepspeed.zero`."""

from pkgutil import extend_path

from hybrid_engine.extensions.deepspeed.absent import attributes_of
from hybrid_engine.zero import *

__path__ = extend_path(__path__, "hybrid_engine.below_zero")
__getattr__ = attributes_of(__name__)
