"""`deepspeed.runtime.compiler`."""

from hybrid_engine.extensions.deepspeed.compiler_names import *
