"""Which of an op's forms runs, the Triton kernel or the torch reference, and how kernels are started.

Kernels run on CUDA tensors; with `TRITON_INTERPRET=1` set before the import they run on the CPU through
Triton's interpreter, slowly, which is how they are tested without a GPU. `HYBRID_ENGINE_FALLBACK=1` forces
the references everywhere; where it is not set, an op whose kernel does not compile runs its reference alone
(`kernel_errors.py`). On a CPU some ops have a third, compiled form, which `cpu_kernels.use_compiled` chooses where
no kernel runs. Where Triton is not installed `triton` and `tl` are stand-ins that let the
kernels be defined and never run.
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
# As Triton read it: a kernel is interpreted or compiled from the moment it is defined.
IS_INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SWITCH = "HYBRID_ENGINE_FALLBACK"

_said: set[str] = set()


def fallback_forced() -> bool:
    """Whether the environment asks for references everywhere; ValueError for a value that is neither 0 nor 1."""
    value = os.environ.get(SWITCH, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"{SWITCH}={value!r} must be 0 or 1; 1 runs the torch references instead of kernels")
    return value == "1"


def use_triton(tensor: torch.Tensor) -> bool:
    """True where a kernel can take `tensor`: on CUDA (or interpreted), in a float dtype, not switched off."""
    if not (tensor.is_cuda or IS_INTERPRETED):
        return False
    return HAS_TRITON and tensor.dtype in KERNEL_DTYPES and not fallback_forced()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, device: torch.device, **meta: Any) -> None:
    """Starts a Triton kernel on `device`, which need not be the current one."""
    find_launch(kernel, grid, args, device, meta)(*args)


def say_once(line: str) -> None:
    """Logs a warning the first time it comes up in this process, the first of those that a launcher started."""
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
    """Raises ValueError naming `name`, what it is and what was expected, before a kernel reads it.

    Args:
        like: the device, and where `dtype` is None the dtype, that `tensor` must have.
        shape: sizes; None where any will do.
        is_dense_last: elements of the last dimension must be neighbours in memory.
    """
    expected_dtype = dtype if dtype is not None or like is None else like.dtype
    if expected_dtype is not None and tensor.dtype != expected_dtype:
        raise ValueError(f"{name} is {tensor.dtype}; expected {expected_dtype}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}; expected {like.device}")
    # Before each launch: what fits is found without looking at each dimension.
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
    """The least power of two that is not below `n`."""
    return 1 << max(n - 1, 0).bit_length()
