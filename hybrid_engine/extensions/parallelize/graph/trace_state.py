"""What a trace of a module's forward depends on besides its arguments: modes and plain attributes, torch.autocast.

`module.norm.eval()` or `module.dropout.p = 0.0` make other ops of the same arguments, and so do autocast's dtypes.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from hybrid_engine.distributed.processes import default_device

PLAIN = (bool, int, float, str)


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
