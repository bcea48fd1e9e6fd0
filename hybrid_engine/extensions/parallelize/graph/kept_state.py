"""State that a forward pass leaves for the next one: replaced buffers are written in place, other state gets a warning.

`trace` uses this. `trace_state` records the modes and attributes that a graph was traced for.
"""

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
    """Context for tracing `module`: a buffer that a submodule replaces (`self.queue = ...`) is written in place.

    torch.export handles this for the outermost module only, and loses it for others. Raises ValueError if the new value
    has another shape or dtype. Numbers and tensors in plain attributes cannot be kept: a warning names them.
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
        return  # torch.export handles buffers of the outermost module
    with torch.no_grad():
        buffer.copy_(new)
    part._buffers[name] = buffer


def _shown(buffer: Tensor | None) -> str:
    return "None" if buffer is None else f"{buffer.dtype} of {tuple(buffer.shape)}"


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Plain attributes, keyed by their paths."""
    return {
        f"{path}.{name}".removeprefix("."): value
        for path, part in module.named_modules()
        for name, value in part.__dict__.items()
    }


def _is_lost(old: Any, new: Any) -> bool:
    """Whether a forward pass has set the attribute to a tensor or another number."""
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
    """Autocast's dtype or None, and the modes, numbers and strings that the parts of `module` hold, in their order."""
    return autocast_dtype(), tuple(tuple(plain_attributes(part).items()) for part in module.modules())


def autocast_dtype() -> torch.dtype | None:
    """The dtype of torch.autocast on this process's device; None if it is off."""
    kind = default_device().type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def copy_trace_state(module: nn.Module, to: nn.Module) -> None:
    """Copies the modes and plain attributes of `module` to `to`, which has the same module tree."""
    for path, part in module.named_modules():
        other = vars(to.get_submodule(path))
        other.update((name, value) for name, value in plain_attributes(part).items() if name in other)


def plain_attributes(part: nn.Module) -> dict[str, Any]:
    """The numbers and strings that a module holds under public names."""
    return {name: value for name, value in vars(part).items() if type(value) in PLAIN and name[0] != "_"}
