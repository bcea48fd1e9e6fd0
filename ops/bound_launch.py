"""Launches that are prepared once for tensors of one form: Triton's part, and the ops' own checks and choices.

For each launch Triton asks of every argument again what it compiles a kernel for: dtypes, addresses and numbers that
divide by 16, numbers that are 1. That takes three times as long as the start itself, and what an op checks and chooses
before it as long again. All of it follows from the form of the tensors, which a model's layers share from the first to
the last: an op keeps what it prepared by that form (`prepared`). A launch of no such op is found by its arguments.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

try:
    from triton.runtime import driver
except ImportError:  # platforms without Triton start no kernel
    driver = None

MAX_KEPT = 8192
"""Launches, or what an op prepared, that are kept for different arguments."""

T = TypeVar("T")


class Launch:
    """A kernel on a grid of programs, for arguments of one form.

    Args:
        kernel: what `triton.jit` made.
        grid: up to three numbers of programs.
        device: where the tensors are; it need not be the current one.
        meta: constants of the kernel, and options of the compiler.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], device: torch.device, **meta: Any):
        self.kernel, self.grid, self.device, self.meta = kernel, grid, device, meta
        self._bound: tuple[Any, ...] | None = None

    def __call__(self, *args: Any) -> None:
        """Starts the kernel on its device's current stream; numbers must be those of the first call."""
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
        """Triton compiles, and what it compiled is kept where every parameter has its argument or its constant."""
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

    `prepare` may ask a tensor for its sizes, strides, dtype, device and place within 16 bytes alone, and keeps none.
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
    """For whoever changes what ops choose by: what they prepared before is not used any more."""
    _kept.clear()


_launches: dict[tuple[Any, ...], Launch] = {}


def find_launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], device: torch.device, meta: dict[str, Any]
) -> Launch:
    """The launch of `kernel` with such arguments as `args`."""
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
    """Adds what Triton compiles for: numbers as they are, of a tensor its dtype and its address within 16 bytes."""
    for arg in args:
        kind = arg.__class__
        if kind is int or arg is None:
            described.append(arg)
        elif kind is torch.Tensor or kind is torch.nn.Parameter:  # the quick way; subclasses are rare
            described.append(arg.dtype)
            described.append(arg.data_ptr() & 15)
        elif isinstance(arg, tuple):
            _describe(arg, described)
        elif isinstance(arg, torch.Tensor):
            described += (arg.dtype, arg.data_ptr() & 15)
        else:  # 1.0 and True equal 1 and are compiled for as other types; all floats alike
            described.append(kind)
            described.append(None if kind is float else arg)
