"""`zero.register_external_parameter`: parameters that the forward pass of another module uses than the one they are of.

A transformer layer's parameters are gathered (at stage 3) and its gradients reduced (at every stage) when that layer
has run; all others once, around everything. So a layer's parameter that is used elsewhere must be known before the
model is sharded: that layer is then gathered in parts, and what uses the parameter with the rest.
"""

import traceback
from collections.abc import Sequence

from torch import nn

ATTRIBUTE = "_external_params"
"""Of a module: the registered parameters, until the model is sharded."""
MIXED = "got mixed torch.Tensor and DTensor"
"""What PyTorch says of a shard that meets a plain tensor."""
_REMEDY = (
    "call zero.register_external_parameter(module, parameter) before initialize() for the module that uses it outside "
    "its layer"
)
SHARD_USED = (
    f"forward(): a parameter of a transformer layer was used outside of that layer, where stage 3 has only its shard; "
    f"{_REMEDY}"
)
LATE = (
    f"backward(): a parameter of a transformer layer was used before that layer, so its gradient came after the "
    f"layer's were reduced; the gradients were dropped; {_REMEDY}"
)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Says, before `initialize()`, that the forward pass of `module` uses `parameter`, which is another module's.

    Nothing needs it but a parameter of a transformer layer that is used outside that layer, on several processes.
    """
    if not isinstance(parameter, nn.Parameter):
        raise ValueError(f"register_external_parameter(): {type(parameter).__name__} is no parameter; pass one")
    vars(module).setdefault(ATTRIBUTE, []).append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Takes a registration back; raises ValueError when there is none."""
    registered = vars(module).get(ATTRIBUTE, [])
    places = [index for index, param in enumerate(registered) if param is parameter]
    if not places:
        raise ValueError("unregister_external_parameter(): the parameter is not registered for this module")
    del registered[places[0]]


def take_external_uses(root: nn.Module) -> list[tuple[nn.Module, nn.Parameter]]:
    """The registered uses, each with its module; drops the registrations, which would keep whole weights."""
    return [(part, param) for part in root.modules() for param in vars(part).pop(ATTRIBUTE, ())]


def describe_shard_used(error: BaseException, root: nn.Module, groups: Sequence[nn.Module]) -> str:
    """What to tell the user about a shard that met a plain tensor, with the module in whose code it did.

    Args:
        error: what PyTorch raised.
        root: the engine's module.
        groups: the parts of it that are gathered alone.
    """
    names = {module: name for name, module in root.named_modules()}
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    used = [module for module in frames if isinstance(module, nn.Module) and module in names]
    if not used:
        return SHARD_USED
    group = next((group for group in groups if used[-1] in set(group.modules())), None)
    where = f"in {names[used[-1]] or 'the model itself'} ({type(used[-1]).__name__})"
    if group is not None:
        where += f"; {names[group]} ({type(group).__name__}) is gathered for its own forward(), not for other methods"
    return f"{SHARD_USED}. It was {where}"
