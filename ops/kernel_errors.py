"""Names the kernel that did not compile: Triton's own errors show its source, or a pass of the compiler, or nothing.

Kernels are compiled when they are first launched. Containers that are being built then give way to the model's own
`generate()`, with one line; elsewhere the error ends what runs.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hybrid_engine.ops.dispatch import triton

COMPILER = ("triton.compiler", "triton.backends")
"""Modules of Triton in which a kernel is compiled and loaded."""
LAUNCH, OPS = "hybrid_engine.ops.dispatch", "hybrid_engine.ops."


class KernelError(RuntimeError):
    """A kernel does not compile with this Triton or for this GPU; made of its text alone, which travels."""


@contextmanager
def naming_kernels() -> Iterator[None]:
    """Inside, the error of a kernel that does not compile becomes a KernelError with its name."""
    try:
        yield
    except Exception as error:
        if (text := describe_kernel_error(error)) is None:
            raise
        raise KernelError(text) from error


def describe_kernel_error(error: BaseException) -> str | None:
    """Which kernel of which op did not compile, and the end of what the compiler says; None for any other error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    compiled = any(_module_of(frame).startswith(COMPILER) for frame in frames)
    if not compiled or isinstance(error, KernelError):
        return None
    launches = [frame for frame in frames if _module_of(frame) == LAUNCH and "kernel" in frame.f_locals]
    callers = [frame for frame in frames if _module_of(frame).startswith(OPS) and _module_of(frame) != LAUNCH]
    kernel = getattr(launches[-1].f_locals["kernel"], "__name__", "a kernel") if launches else "a kernel"
    before = [frame for frame in callers if not launches or frames.index(frame) < frames.index(launches[-1])]
    op = _module_of(before[-1]).removeprefix(OPS) if before else "an op"
    last = (str(error).strip().splitlines() or [""])[-1].strip()
    return f"{kernel} of {op} does not compile with Triton {triton.__version__}: {type(error).__name__}: {last}"


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
