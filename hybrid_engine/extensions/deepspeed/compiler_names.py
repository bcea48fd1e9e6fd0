"""`deepspeed.runtime.compiler`: the caller compiles the module with torch.compile."""

from torch.compiler import disable, is_compiling

__all__ = ["disable", "is_compile_supported", "is_compiling"]


def is_compile_supported() -> bool:
    """True: PyTorch can always compile."""
    return True
