"""Chooses which form of an op runs, the Triton kernel or the torch reference, and launches kernels.

Kernels run on CUDA tensors; with `TRITON_INTERPRET=1` set before the import they run on the CPU through
Triton's interpreter, slowly, which is how they are tested without a GPU. `HYBRID_ENGINE_FALLBACK=1` forces the
references everywhere; if it is not set, an op whose kernel does not compile runs its reference, and only that op
(`kernel_errors.py`). On a CPU some ops have a third, compiled form, which `cpu_kernels.use_compiled` chooses if no
kernel runs. If Triton is not installed `triton` and `tl` are stand-ins that let the kernels be defined but not run.
"""

import logging
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from hybrid_engine.ops.bound_launch import find_launch

try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton
    triton = SimpleNamespace(jit=lambda function=None, **_: function or (lambda kernel: kernel), __version__="")
    tl = SimpleNamespace(constexpr=None)

logger = logging.getLogger("hybrid_engine")

HAS_TRITON = bool(triton.__version__)
# As read by Triton: a kernel is interpreted or compiled from its definition on.
IS_INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SWITCH = "HYBRID_ENGINE_FALLBACK"

_said: set[str] = set()


def fallback_forced() -> bool:
    """Whether the environment forces references everywhere; ValueError for a value that is neither 0 nor 1."""
    value = os.environ.get(SWITCH, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"{SWITCH}={value!r} must be 0 or 1; 1 runs the torch references instead of kernels")
    return value == "1"


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether a kernel can take `tensor`: on CUDA (or interpreted), in a float dtype, not switched off."""
    if not (tensor.is_cuda or IS_INTERPRETED):
        return False
    return HAS_TRITON and tensor.dtype in KERNEL_DTYPES and not fallback_forced()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, device: torch.device, **meta: Any) -> None:
    """Launches a Triton kernel on `device`, which need not be the current one."""
    find_launch(kernel, grid, args, device, meta)(*args)


def say_once(line: str) -> None:
    """Logs a warning the first time it occurs in this process, on rank 0 only."""
    if line not in _said and os.environ.get("RANK", "0") == "0":
        _said.add(line)
        logger.warning(line)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    like: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    shape: Sequence[int | None] | None = None,
    is_dense_last: bool = False,
) -> None:
    """Raises ValueError with the name, the actual and the expected property, before a kernel reads the tensor.

    Args:
        like: a tensor with the required device, and the required dtype if `dtype` is None.
        shape: sizes; None for any.
        is_dense_last: elements of the last dimension must be adjacent in memory.
    """
    expected_dtype = dtype if dtype is not None or like is None else like.dtype
    if expected_dtype is not None and tensor.dtype != expected_dtype:
        raise ValueError(f"{name} is {tensor.dtype}; expected {expected_dtype}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}; expected {like.device}")
    # Runs before each launch: a fitting shape is accepted without a loop over dimensions.
    if shape is not None and tensor.shape != shape:
        fits = len(shape) == tensor.dim()
        for expected_size, size in zip(shape, tensor.shape, strict=False):
            fits = fits and (expected_size is None or expected_size == size)
        if not fits:
            expected = ", ".join("any" if n is None else str(n) for n in shape)
            raise ValueError(f"{name} has shape {list(tensor.shape)}; expected [{expected}]")
    if is_dense_last and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has strides {tensor.stride()}; expected 1 in the last dimension")


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()
