"""`deepspeed.runtime.compiler`."""

from torch.compiler import disable, is_compiling

from hybrid_engine.extensions.deepspeed.utils import is_compile_supported
