"""`zero.register_external_parameter`: parameters that the forward pass of another module uses than the one they are of.

A transformer layer's parameters are gathered (at stage 3) and its gradients reduced (at every stage) when that layer
has run; all others once, around everything. So a layer's parameter that is used elsewhere must be known before the
model is sharded: that model's layers are then gathered and reduced all at once, with the rest.
"""

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


def can_gather_layers_alone(root: nn.Module, layers: Sequence[nn.Module]) -> bool:
    """Whether each of the layers may be gathered alone; drops all registrations, which would keep whole weights."""
    uses = [(part, param) for part in root.modules() for param in vars(part).pop(ATTRIBUTE, ())]
    return not any(_is_used_elsewhere(layer, uses) for layer in layers)


def _is_used_elsewhere(layer: nn.Module, uses: list[tuple[nn.Module, nn.Parameter]]) -> bool:
    parts = set(layer.modules())
    own = {id(param) for param in layer.parameters()}
    return any(id(param) in own and part not in parts for part, param in uses)
