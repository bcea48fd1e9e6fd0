"""Handles kernels that do not compile: they are named and replaced by their op's torch reference.

Triton's own errors show a kernel's source, or a pass of the compiler, or nothing. Kernels are compiled when they are
first launched. An op whose kernel does not compile then runs in torch until the process ends, with one warning. It is
an error, with the kernel's name, if `HYBRID_ENGINE_FALLBACK=0` requires kernels, or while an exact model exists: a
reference does not compute the kernel's bits.
"""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakSet

from hybrid_engine.ops.dispatch import SWITCH, say_once, triton

COMPILER = ("triton.compiler", "triton.backends")
"""Modules of Triton that compile and load kernels."""
LAUNCHES, OPS = ("hybrid_engine.ops.dispatch", "hybrid_engine.ops.bound_launch"), "hybrid_engine.ops."

Result = TypeVar("Result")

_replaced: dict[Callable[..., Any], str] = {}  # the reason, by the function that launches an op's kernels
_need_kernels: "WeakSet[object]" = WeakSet()


class KernelError(RuntimeError):
    """A kernel does not compile with this Triton or for this GPU; built from text only, so that it can be pickled."""


def kernel_or_reference(by_kernel: Callable[..., Result], reference: Callable[..., Result], *arguments: Any) -> Result:
    """`by_kernel(*arguments)`; after a kernel of `by_kernel` did not compile, `reference(*arguments)`.

    `by_kernel` may have launched others before; `reference` writes their outputs again.
    """
    if _replaced and _function_of(by_kernel) in _replaced:
        return reference(*arguments)
    try:
        return by_kernel(*arguments)
    except Exception as error:
        _replace(by_kernel, error)
    return reference(*arguments)


def _replace(by_kernel: Callable[..., Any], error: Exception) -> None:
    """Raises `error` unless it is from a kernel that may be replaced."""
    text = describe_kernel_error(error)
    must_run = os.environ.get(SWITCH) == "0" or len(_need_kernels) > 0
    if text is None or must_run or "out of memory" in str(error):  # GPU memory, for the kernel's code
        raise error
    _replaced[_function_of(by_kernel)] = text
    say_once(f"{text}; torch's operations run in its place")


def _function_of(by_kernel: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(by_kernel, "__func__", by_kernel)


def is_replaced(by_kernel: Callable[..., Any]) -> bool:
    """Whether a kernel that the function launches did not compile, so that the op runs in torch."""
    return _function_of(by_kernel) in _replaced


def replaced_kernels() -> list[str]:
    """Descriptions of the kernels that did not compile and run in torch."""
    return list(_replaced.values())


def need_kernels(holder: object) -> None:
    """Forbids replacing kernels while `holder` is alive."""
    _need_kernels.add(holder)


@contextmanager
def naming_kernels() -> Iterator[None]:
    """Inside, the error of a kernel that does not compile is raised as a KernelError with the kernel's name."""
    try:
        yield
    except Exception as error:
        if (text := describe_kernel_error(error)) is None:
            raise
        raise KernelError(text) from error


def describe_kernel_error(error: BaseException) -> str | None:
    """Kernel, op and last line of a compiler error; None for any other error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    compiled = any(_module_of(frame).startswith(COMPILER) and not _is_start(frame) for frame in frames)
    if not compiled or isinstance(error, KernelError):
        return None
    launches = [frame for frame in frames if _module_of(frame) in LAUNCHES and "kernel" in frame.f_locals]
    callers = [frame for frame in frames if _module_of(frame).startswith(OPS) and _module_of(frame) not in LAUNCHES]
    kernel = getattr(launches[-1].f_locals["kernel"], "__name__", "a kernel") if launches else "a kernel"
    before = [frame for frame in callers if not launches or frames.index(frame) < frames.index(launches[-1])]
    op = _module_of(before[-1]).removeprefix(OPS) if before else "an op"
    last = (str(error).strip().splitlines() or [""])[-1].strip()
    return f"{kernel} of {op} does not compile with Triton {triton.__version__}: {type(error).__name__}: {last}"


def _is_start(frame: FrameType) -> bool:
    """Whether the frame launches a compiled kernel, so that its errors are the device's."""
    return _module_of(frame).endswith(".driver") and frame.f_code.co_name == "__call__"


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
