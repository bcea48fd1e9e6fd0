"""Requirements of kernels on a GPU and its driver, and reasons why no GPU is found.

Checked when engines, runs and `doctor` start.
"""

import ctypes
import functools
import os
from contextlib import suppress

import torch

from hybrid_engine.ops.dispatch import HAS_TRITON, SWITCH, fallback_forced, triton

OLDEST_CAPABILITY = (8, 0)
"""Ampere, the oldest architecture that Triton supports and that has bf16 products."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
GIB = 1 << 30
FOREIGN_SHARE, FOREIGN_BYTES = 0.05, GIB
"""Share of the memory, and bytes, that the driver and this process's context may take; the rest counts as foreign."""


def why_no_gpu() -> str | None:
    """The reason why torch finds no GPU, if it is another than a machine without one; None if torch finds one."""
    if torch.cuda.is_available():
        return None
    visible = os.environ.get(VISIBLE)
    if visible is not None and (not visible.strip() or visible.strip().startswith("-1")):
        return f"{VISIBLE}={visible!r} hides every GPU; unset it, or name one by its number, such as {VISIBLE}=0"
    driver, built = driver_version(), torch.version.cuda
    if driver is None:
        return None
    if built is None:
        return f"there is an NVIDIA driver, and torch {torch.__version__} was built for CPUs; install a build for CUDA"
    if driver < _numbers(built):
        return f"the driver is one for CUDA {_text(driver)}, and torch was built for CUDA {built}; install a newer one"
    return None


def kernel_problem(device: torch.device) -> str | None:
    """The reason why kernels cannot run on the GPU `device`, with the remedy; None if they can or are switched off."""
    if device.type != "cuda" or not HAS_TRITON or fallback_forced():
        return None
    capability = torch.cuda.get_device_capability(device)
    remedy = f"or set {SWITCH}=1, which runs torch's operations in place of kernels"
    if capability < OLDEST_CAPABILITY:
        return (
            f"{device} is a {torch.cuda.get_device_name(device)} of compute capability {_text(capability)}, and "
            f"kernels need {_text(OLDEST_CAPABILITY)} or newer; use a newer GPU, {remedy}"
        )
    driver, compiler = driver_version(), compiler_version()
    if driver is not None and compiler is not None and driver[0] < compiler[0]:
        return (
            f"the driver is one for CUDA {_text(driver)}, and Triton {triton.__version__} compiles kernels for CUDA "
            f"{_text(compiler)}; install a driver for CUDA {compiler[0]}.0 or newer, or an older Triton, {remedy}"
        )
    return None


def foreign_memory_line(device: torch.device) -> str | None:
    """A line about large memory use of `device` by other processes, or None; to be called before this one allocates."""
    free, total = torch.cuda.mem_get_info(device)
    foreign = total - free - torch.cuda.memory_reserved(device)
    if foreign <= max(FOREIGN_SHARE * total, FOREIGN_BYTES):
        return None
    return (
        f"{device} has {free / GIB:.1f} of {total / GIB:.1f} GiB free, and other processes hold {foreign / GIB:.1f} "
        "GiB (nvidia-smi lists them); end them, or choose another GPU by " + VISIBLE
    )


@functools.cache
def load_driver() -> ctypes.CDLL | None:
    """The NVIDIA driver's library, or None."""
    with suppress(OSError):
        return ctypes.CDLL("libcuda.so.1")
    return None


@functools.cache
def driver_version() -> tuple[int, int] | None:
    """The newest CUDA version that the NVIDIA driver supports, such as (12, 8); None without a driver."""
    driver, number = load_driver(), ctypes.c_int(0)
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


@functools.cache
def compiler_version() -> tuple[int, int] | None:
    """The CUDA version of the assembler in Triton; None if it is unknown."""
    try:
        from triton import knobs  # not every Triton has it

        return _numbers(knobs.nvidia.ptxas.version)
    except (ImportError, AttributeError, RuntimeError, OSError, ValueError):
        return None


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
