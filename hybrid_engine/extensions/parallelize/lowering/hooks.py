"""The eager lowering: hooks that put each module of the original tree on this process's parts.

Before a module's forward its parameters become local tensors, arguments are re-laid as its ops want them, and sizes are
those of parts; after it results are re-laid as the code around it wants them, and the module is as it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from hybrid_engine.extensions.parallelize.lowering.borders import Border
from hybrid_engine.extensions.parallelize.lowering.relaying import Relay, term_of_sum


class Hooks:
    """The hooks of one module tree. `mesh` is that over which its plan splits, and may be exchanged for one alike."""

    def __init__(
        self,
        root: nn.Module,
        mesh: DeviceMesh,
        borders: Mapping[str, Border],
        sizes: Mapping[str, Mapping[str, int]],
    ):
        self.mesh = mesh
        self._last: tuple[Any, DTensor] | None = None
        for path in {**borders, **sizes}:
            _Around(self, borders.get(path, Border()), dict(sizes.get(path, {}))).attach(root.get_submodule(path))
        root.register_forward_hook(self._forget, always_call=True)

    def _forget(self, *_: Any) -> None:
        self._last = None

    def relaid(self, value: Any, relay: Relay) -> Any:
        """The nested value with each of its tensors in the layout that is wanted."""
        return pytree.tree_map(lambda leaf: self._relaid(leaf, relay) if isinstance(leaf, Tensor) else leaf, value)

    def _relaid(self, tensor: Tensor, relay: Relay) -> Tensor:
        """Modules that read one tensor one after the other, as projections do, share its gradient's one sum."""
        version = None if tensor.is_inference() else tensor._version
        key = (tensor, version, relay.layout, relay.reached, torch.is_grad_enabled())
        if self._last is None or self._last[0][0] is not tensor or self._last[0][1:] != key[1:]:
            self._last = key, relay.entered(tensor, self.mesh)
        return relay.left(self._last[1])


@dataclass
class _Around:
    """What is done around the forward of one module, and what of it is there meanwhile."""

    hooks: Hooks
    border: Border
    sizes: dict[str, int]
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self.after)
        module.register_forward_hook(self.restore, always_call=True)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        parameters = {name: module._parameters[name] for name in self.border.parameters}
        self.kept.append((parameters, {name: module.__dict__[name] for name in self.sizes}))
        module._parameters.update(
            {name: _local(parameters[name], relay) for name, relay in self.border.parameters.items()}
        )
        module.__dict__.update(self.sizes)
        return (
            (args, kwargs) if self.border.entering is None else self.hooks.relaid((args, kwargs), self.border.entering)
        )

    def after(self, module: nn.Module, args: Any, result: Any) -> Any:
        return result if self.border.leaving is None else self.hooks.relaid(result, self.border.leaving)

    def restore(self, module: nn.Module, *_: Any) -> None:
        if self.kept:
            parameters, sizes = self.kept.pop()
            module._parameters.update(parameters)
            module.__dict__.update(sizes)


def _local(parameter: Any, relay: Relay) -> Any:
    """This process's part of a parameter as the code of its module reads it."""
    if not isinstance(parameter, DTensor):
        return parameter  # gathered by somebody else, as while a checkpoint is exported
    mesh = parameter.device_mesh
    local = parameter.redistribute(mesh, relay.reached).to_local(grad_placements=relay.gradient)
    return term_of_sum(local, mesh, relay.wanted, relay.reached)
