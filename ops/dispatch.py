"""Chooses which form of an op runs, the Triton kernel or the torch reference, and launches kernels.

Kernels run on CUDA tensors; with `TRITON_INTERPRET=1` set before the import they run on the CPU through Triton's
interpreter, slowly, which is how they are tested without a GPU. `HYBRID_ENGINE_FALLBACK=1` forces the references
everywhere. On a CPU some ops have a third, compiled form, which `cpu_kernels.use_compiled` chooses if no kernel runs.
If Triton is not installed `triton` and `tl` are stand-ins that let the kernels be defined but not run.

A launch is prepared once per form of the tensors. At each launch Triton inspects every argument for the properties it
compiles a kernel for: dtypes, addresses and numbers divisible by 16, numbers equal to 1. That takes three times as
long as the launch itself, and an op's checks and choices before it take as long again. All of it depends only on the
form of the tensors, which all layers of a model share: an op caches the prepared launch by that form (`prepared`).

A kernel that does not compile is named. Triton's own errors show a kernel's source, or a pass of the compiler, or
nothing. Kernels are compiled when they are first launched. An op whose kernel does not compile then runs in torch
until the process ends, with one warning. It is an error, with the kernel's name, if `HYBRID_ENGINE_FALLBACK=0`
requires kernels, or while an exact model exists: a reference does not compute the kernel's bits.
"""

import logging
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakSet

import torch

logger = logging.getLogger("hybrid_engine")
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SWITCH = "HYBRID_ENGINE_FALLBACK"
_said: set[str] = set()
MAX_KEPT = 8192
"""Maximum number of prepared objects."""
T = TypeVar("T")
_kept: dict[tuple[Any, ...], Any] = {}
COMPILER = ("triton.compiler", "triton.backends")
"""Modules of Triton that compile and load kernels."""
OPS = "hybrid_engine.ops."
Result = TypeVar("Result")
_replaced: dict[Callable[..., Any], str] = {}  # the reason, by the function that launches an op's kernels
_need_kernels: "WeakSet[object]" = WeakSet()


try:
    import triton
    import triton.language as tl
except ImportError:  # platforms without Triton
    triton = SimpleNamespace(jit=lambda function=None, **_: function or (lambda kernel: kernel), __version__="")
    tl = SimpleNamespace(constexpr=None)


HAS_TRITON = bool(triton.__version__)


# As read by Triton: a kernel is interpreted or compiled from its definition on.
IS_INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


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
    # Some ops check at each call: a fitting shape is accepted without a loop over dimensions.
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


try:
    from triton.runtime import driver
except ImportError:  # platforms without Triton do not launch kernels
    driver = None


class Launch:
    """A kernel on a grid of programs, for arguments of one form.

    Args:
        kernel: the result of `triton.jit`.
        grid: up to three numbers of programs.
        device: device of the tensors; it need not be the current one.
        meta: constants of the kernel, and options of the compiler.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], device: torch.device, **meta: Any):
        self.kernel, self.grid, self.device, self.meta = kernel, grid, device, meta
        self._bound: tuple[Any, ...] | None = None

    def __call__(self, *args: Any) -> None:
        """Launches the kernel on its device's current stream.

        Tensors must be of the form of the first call's, and integers equal to its integers: both are compiled for.
        """
        current = torch.cuda.current_device() if self.device.type == "cuda" else 0
        index = current if self.device.index is None else self.device.index
        if index != current:
            with torch.cuda.device(index):
                self(*args)
        elif self._bound is None:
            self._start_first(args)
        else:
            run, function, metadata, constants, grid, stream_of = self._bound
            run(*grid, stream_of(index), function, metadata, None, None, None, *args, *constants)

    def _start_first(self, args: tuple[Any, ...]) -> None:
        """Compiles the kernel, and keeps the result if every parameter has an argument or a constant."""
        kernel = self.kernel
        compiled = kernel[self.grid](*args, **self.meta)
        if compiled is None:  # interpreted
            return
        names = kernel.arg_names[len(args) :]
        if all(name in self.meta for name in names):
            constants = tuple(self.meta[name] for name in names)
            grid = (*self.grid, 1, 1)[:3]
            stream_of = driver.active.get_current_stream
            self._bound = (compiled.run, compiled.function, compiled.packed_metadata, constants, grid, stream_of)


def prepared(prepare: Callable[..., T], *arguments: Any) -> T:
    """The result of `prepare` for the first arguments of this form: tensors, None, or values that can be hashed.

    `prepare` may only read a tensor's sizes, strides, dtype, device and address modulo 16, and must not keep tensors.
    The form of all that a prepared launch takes must follow from the arguments; new memory is always aligned.
    """
    key = (prepare, form_of(*arguments))
    found = _kept.get(key)
    if found is None:
        if len(_kept) >= MAX_KEPT:
            _kept.clear()
        found = _kept[key] = prepare(*arguments)
    return found


def form_of(*arguments: Any) -> tuple[Any, ...]:
    """The properties that a launch is prepared for; equal for arguments that its kernel does not tell apart."""
    form: list[Any] = []
    for argument in arguments:
        if argument is None:  # before `isinstance`, which takes longest for what is no tensor
            form.append(None)
        elif isinstance(argument, torch.Tensor):
            form += (argument.shape, argument.stride(), argument.dtype, argument.data_ptr() & 15, argument.device)
        else:
            form.append(argument)
    return tuple(form)


def forget_prepared() -> None:
    """Clears the cache; to be called after a change of anything that ops base their choices on."""
    _kept.clear()


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
    launches = [frame for frame in frames if _module_of(frame) == __name__ and "kernel" in frame.f_locals]
    callers = [frame for frame in frames if _module_of(frame).startswith(OPS) and _module_of(frame) != __name__]
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
