"""Kernels started anew with what Triton found out about such arguments before.

For each launch Triton asks of every argument again what it compiles a kernel for: dtypes, addresses and numbers that
divide by 16, numbers that are 1. That takes three times as long as the start itself. Here the compiled kernel is found
by the arguments' dtypes, the alignment of their addresses and the numbers as they are.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

try:
    from triton.runtime import driver
except ImportError:  # platforms without Triton start no kernel
    driver = None

MAX_BOUND = 8192
"""Kernels with arguments of one description that are kept."""


class Bound(NamedTuple):
    """A compiled kernel and what its start takes beside the grid, the stream and the arguments."""

    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]  # the last parameters, in their order


_bound: dict[tuple[Any, ...], Bound] = {}


def start(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any], device: int) -> None:
    """Starts `kernel` on the current stream of the current device, whose number is `device`."""
    described: list[Any] = [id(kernel), device]
    describe(args, described)
    key = (*described, *meta.values())
    bound = _bound.get(key)
    if bound is None:
        _bind(key, kernel, kernel[grid](*args, **meta), len(args), meta)
        return
    grid_x, grid_y, grid_z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(device)
    bound.run(grid_x, grid_y, grid_z, stream, bound.function, bound.metadata, None, None, None, *args, *bound.constants)


def describe(args: tuple[Any, ...], described: list[Any]) -> None:
    """Adds what Triton compiles for: numbers as they are, of a tensor its dtype and its address within 16 bytes."""
    for arg in args:
        kind = arg.__class__
        if kind is int or arg is None:
            described.append(arg)
        elif kind is torch.Tensor or kind is torch.nn.Parameter:  # the quick way; subclasses are rare
            described.append(arg.dtype)
            described.append(arg.data_ptr() & 15)
        elif isinstance(arg, tuple):
            describe(arg, described)
        elif isinstance(arg, torch.Tensor):
            described += (arg.dtype, arg.data_ptr() & 15)
        else:  # 1.0 and True equal 1 and are compiled for as other types; all floats alike
            described.append(kind)
            described.append(None if kind is float else arg)


def _bind(key: tuple[Any, ...], kernel: Any, compiled: Any, num_args: int, meta: dict[str, Any]) -> None:
    """Keeps what Triton has compiled, where every parameter without an argument has its value in `meta`."""
    names = kernel.arg_names[num_args:]
    if compiled is None or not all(name in meta for name in names):
        return
    if len(_bound) >= MAX_BOUND:
        _bound.clear()
    constants = tuple(meta[name] for name in names)
    _bound[key] = Bound(compiled.run, compiled.function, compiled.packed_metadata, constants)
