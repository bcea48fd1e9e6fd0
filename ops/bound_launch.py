"""Kernel launches that are prepared once per form of the tensors: Triton's part, and the ops' own checks and choices.

At each launch Triton inspects every argument for the properties it compiles a kernel for: dtypes, addresses and numbers
divisible by 16, numbers equal to 1. That takes three times as long as the launch itself, and an op's checks and choices
before it take as long again. All of it depends only on the form of the tensors, which all layers of a model share: an
op caches the prepared launch by that form (`prepared`). Launches of other ops are found by their arguments.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

try:
    from triton.runtime import driver
except ImportError:  # platforms without Triton do not launch kernels
    driver = None

MAX_KEPT = 8192
"""Maximum number of cached launches, or prepared objects of ops."""

T = TypeVar("T")


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
        """Launches the kernel on its device's current stream; numbers must be those of the first call."""
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


_kept: dict[tuple[Any, ...], Any] = {}


def prepared(prepare: Callable[..., T], *arguments: Any) -> T:
    """The result of `prepare` for the first arguments of this form: tensors, None, or values that can be hashed.

    `prepare` may only read a tensor's sizes, strides, dtype, device and address modulo 16, and must not keep tensors.
    """
    form = [
        (argument.shape, argument.stride(), argument.dtype, argument.data_ptr() & 15, argument.device)
        if isinstance(argument, torch.Tensor)
        else argument
        for argument in arguments
    ]
    key = (prepare, *form)
    found = _kept.get(key)
    if found is None:
        if len(_kept) >= MAX_KEPT:
            _kept.clear()
        found = _kept[key] = prepare(*arguments)
    return found


def forget_prepared() -> None:
    """Clears the cache; to be called after a change of anything that ops base their choices on."""
    _kept.clear()


_launches: dict[tuple[Any, ...], Launch] = {}


def find_launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], device: torch.device, meta: dict[str, Any]
) -> Launch:
    """The launch of `kernel` for arguments of the form of `args`."""
    described: list[Any] = [id(kernel), grid, device]
    _describe(args, described)
    key = (*described, *meta.values())
    launch = _launches.get(key)
    if launch is None:
        if len(_launches) >= MAX_KEPT:
            _launches.clear()
        launch = _launches[key] = Launch(kernel, grid, device, **meta)
    return launch


def _describe(args: tuple[Any, ...], described: list[Any]) -> None:
    """Appends the properties that Triton compiles for: values of numbers, dtype and address modulo 16 of tensors."""
    for arg in args:
        kind = arg.__class__
        if kind is int or arg is None:
            described.append(arg)
        elif kind is torch.Tensor or kind is torch.nn.Parameter:  # the fast path; subclasses are rare
            described.append(arg.dtype)
            described.append(arg.data_ptr() & 15)
        elif isinstance(arg, tuple):
            _describe(arg, described)
        elif isinstance(arg, torch.Tensor):
            described += (arg.dtype, arg.data_ptr() & 15)
        else:  # 1.0 and True equal 1 but compile as other types; all floats compile alike
            described.append(kind)
            described.append(None if kind is float else arg)
