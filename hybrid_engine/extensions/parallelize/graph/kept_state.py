"""What a forward pass leaves behind for the next one: buffers that it replaces are written, other state is named."""

import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_engine.distributed.processes import default_device

PLAIN = (bool, int, float, str)


@contextmanager
def kept_state(module: nn.Module) -> Iterator[None]:
    """While `module` is traced: a buffer that a part of it is given anew (`self.queue = ...`) is written in place.

    torch.export sees that of the outermost module alone, and loses it of others. ValueError where the new value is not
    of the same shape and type. Numbers and tensors in plain attributes cannot be kept: a warning names them.
    """
    buffers: dict[str, tuple[nn.Module, dict[str, Tensor | None]]] = {}
    attributes: dict[str, Any] = {}

    def before(*_: Any) -> None:
        buffers.update((path, (part, dict(part._buffers))) for path, part in module.named_modules())
        attributes.update(_attributes(module))

    def after(*_: Any) -> None:
        for path, (part, found) in buffers.items():
            for name, buffer in found.items():
                if part._buffers.get(name) is not buffer:
                    _write_back(part, f"{path}.{name}".removeprefix("."), buffer)
        _warn_of(sorted(name for name, value in _attributes(module).items() if _is_lost(attributes.get(name), value)))

    hooks = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _write_back(part: nn.Module, path: str, buffer: Tensor | None) -> None:
    name = path.rsplit(".", 1)[-1]
    new = part._buffers.get(name)
    if buffer is None or new is None or buffer.shape != new.shape or buffer.dtype != new.dtype:
        raise ValueError(
            f"forward makes of the buffer {path!r}, {_shown(buffer)}, {_shown(new)}; it must stay as it is registered"
        )
    if path == name:
        return  # the outermost module's, which torch.export sees
    with torch.no_grad():
        buffer.copy_(new)
    part._buffers[name] = buffer


def _shown(buffer: Tensor | None) -> str:
    return "None" if buffer is None else f"{buffer.dtype} of {tuple(buffer.shape)}"


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Plain attributes by their paths."""
    return {
        f"{path}.{name}".removeprefix("."): value
        for path, part in module.named_modules()
        for name, value in part.__dict__.items()
    }


def _is_lost(old: Any, new: Any) -> bool:
    """Whether a forward pass has put a tensor or another number there."""
    return old is not new and (isinstance(new, Tensor) or (_is_number(old) and _is_number(new) and old != new))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _warn_of(names: list[str]) -> None:
    if names:
        warnings.warn(
            f"forward sets the attributes {names}; a graph that is traced from it computes with what they were before "
            "the first call. What a later call reads must be a buffer: register_buffer",
            stacklevel=2,
        )


def trace_state(module: nn.Module) -> Hashable:
    """Autocast's dtype, if any, and the modes, numbers and texts that the parts of `module` hold, in their order."""
    return autocast_dtype(), tuple(tuple(plain_attributes(part).items()) for part in module.modules())


def autocast_dtype() -> torch.dtype | None:
    """That of torch.autocast on this process's device; None where it is off."""
    kind = default_device().type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def copy_trace_state(module: nn.Module, to: nn.Module) -> None:
    """Gives the parts of `to`, which has the tree of `module`, the modes and plain attributes of that one's."""
    for path, part in module.named_modules():
        other = vars(to.get_submodule(path))
        other.update((name, value) for name, value in plain_attributes(part).items() if name in other)


def plain_attributes(part: nn.Module) -> dict[str, Any]:
    """The numbers and texts that a module holds under public names."""
    return {name: value for name, value in vars(part).items() if type(value) in PLAIN and name[0] != "_"}
