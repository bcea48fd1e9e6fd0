"""A module as one process holds it: its parts of the parameters, under the names of the original module.

`HeldModule` is the base of `ParallelModule` and handles copies, state dicts and extra state.
"""

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from hybrid_engine.extensions.parallelize.graph.graph import without_weights
from hybrid_engine.extensions.parallelize.graph.kept_state import copy_trace_state, plain_attributes
from hybrid_engine.extensions.parallelize.lowering.meshes import Meshes
from hybrid_engine.extensions.parallelize.planning.layouts import parameter_layouts, split_order
from hybrid_engine.extensions.parallelize.planning.moving import Layout
from hybrid_engine.extensions.parallelize.planning.plan import Plan


class HeldModule(nn.Module):
    """This process's parameters and buffers of a module, as `plan` divides them; base of all with a plan."""

    plan: Plan
    meshes: Meshes

    def __init__(self, module: nn.Module, plan: Plan, meshes: Meshes):
        super().__init__()
        self.plan, self.meshes = plan, meshes
        layouts = parameter_layouts(plan.graph, plan)
        names = self._names_here()
        parts = {
            id(p): part_of(p, meshes.unit, layouts.get(name))
            if names is None or name in names
            else nn.Parameter(torch.empty(0))
            for name, p in module.named_parameters()
        }
        held = copy.deepcopy(module, dict(parts))  # type: ignore[arg-type]
        if names is not None:
            leave_out(held, names, self.canonical)
        # Not submodules: the original says how the module computes, and holds no weights.
        self.__dict__["_original"], self.__dict__["_with_parts"] = without_weights(module), None
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = held.__dict__[name]
        self.training = module.training
        if has_extra_state(module):
            self.__class__ = type(type(self).__name__, (_WithExtraState, type(self)), {})

    def _names_here(self) -> frozenset[str] | None:
        """Names in the graph of the parameters and buffers that this process holds; None: all."""
        return None

    @property
    def unit_size(self) -> int:
        """Number of processes that compute this module together."""
        return 1 if self.meshes.unit is None else self.meshes.unit.size()

    @property
    def split_sizes(self) -> tuple[int, ...]:
        """Sizes of the axes over which parameters are split, outermost first."""
        return () if self.meshes.unit is None else self.plan.mesh

    @property
    def split_order(self) -> tuple[int, ...]:
        """The axes of `split_sizes`, the one over which most is split first."""
        return split_order(self.plan.graph, self.plan)[: len(self.split_sizes)]

    def canonical(self, name: str) -> str:
        """The name of a parameter or buffer in the plan's graph, which is the first one for tied ones."""
        return self.plan.graph.aliases.get(name, name)

    def places(self) -> dict[str, int]:
        """The positions of all parameters in the original module by name, including those of other stages."""
        return {name: place for place, (name, _) in enumerate(self._original.named_parameters())}

    def held(self) -> dict[str, Tensor]:
        """This process's parameters and buffers by their names in the graph."""
        named = [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]
        return {self.canonical(name): tensor for name, tensor in named}

    def adopt(self, mesh: DeviceMesh) -> None:
        """Replaces the unit's mesh by `mesh`, which has the same processes in the same order.

        Optimizers and state dicts that were made before still have the old parts.
        """
        moved: dict[int, nn.Parameter] = {}
        for part in self.modules():
            for name, parameter in part._parameters.items():
                if isinstance(parameter, DTensor):
                    moved.setdefault(id(parameter), moved_to(parameter, mesh))
                    part._parameters[name] = moved[id(parameter)]
        self.meshes = replace(self.meshes, unit=mesh)

    def original(self) -> nn.Module:
        """The original module on meta, with the parameters and buffers that this process holds (the same objects).

        Always returns the same object, which changes its mode with this module. Its submodules are other objects than
        this module's and share their parameter dicts, so that changes by FSDP2 are visible in both.
        """
        if self._with_parts is None:
            self.__dict__["_with_parts"] = copy.deepcopy(self._original)
        original: nn.Module = self._with_parts
        for path, module in original.named_modules():
            held = self.get_submodule(path)
            if all(p is None or held._parameters[name] is not None for name, p in module._parameters.items()):
                module._parameters = held._parameters
            module._buffers.update((name, buffer) for name, buffer in held._buffers.items() if buffer is not None)
        copy_trace_state(self, original)
        return original

    def train(self, mode: bool = True) -> "HeldModule":
        """Sets the mode, also of the module that `original` returned."""
        if self.__dict__.get("_with_parts") is not None:
            self._with_parts.train(mode)
        super().train(mode)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeldModule":
        """A module with its own parameters and buffers, under the same plan over the same processes."""
        meshes = [mesh for mesh in vars(self.meshes).values() if mesh is not None]
        shared = (self.plan, self.meshes, *meshes, self.__dict__.get("_original"))
        memo |= {id(entry): entry for entry in shared if entry is not None}
        copied: HeldModule = object.__new__(type(self))
        memo[id(self)] = copied
        remade = self._remade_state()
        for name, value in self.__dict__.items():
            copied.__dict__[name] = remade[name] if name in remade else copy.deepcopy(value, memo)
        return copied

    def _remade_state(self) -> dict[str, Any]:
        """Attributes that a copy shares, or for which it gets new values."""
        return {"_with_parts": None}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises ValueError: a pickle of one process's parts is useless in another run."""
        raise ValueError(
            f"a parallel {type(self).__name__} is not pickled; save its state_dict(), or merge_state_dicts of all "
            "processes, and load that into a module that parallelize gives"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads this rank's `state_dict()`; ValueError for whole tensors where this module has parts."""
        own = self.state_dict()
        is_whole = {n for n, t in state_dict.items() if isinstance(t, Tensor) and not isinstance(t, DTensor)}
        for name in sorted(is_whole):
            if isinstance(own.get(name), DTensor):
                raise ValueError(
                    f"{name} is whole in the state dict, and in parts here; call load_merged_state_dicts(module, "
                    "state_dict), which divides it"
                )
        return super().load_state_dict(state_dict, strict, assign)


class _WithExtraState(HeldModule):
    """A module whose original has extra state in addition to tensors, which the original reads and sets."""

    def get_extra_state(self) -> Any:
        """The original's extra state."""
        return self.original().get_extra_state()

    def set_extra_state(self, state: Any) -> None:
        """Sets the original's extra state. If this changes its numbers or strings, another graph is traced."""
        original = self.original()
        before = plain_attributes(original)
        original.set_extra_state(state)
        after = plain_attributes(original)
        self.__dict__.update((name, value) for name, value in after.items() if before.get(name, self) != value)


def has_extra_state(module: nn.Module) -> bool:
    """Whether the module's class keeps state in addition to tensors in state dicts."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def leave_out(held: nn.Module, names: Collection[str], canonical: Callable[[str], str]) -> None:
    """Sets the parameters and buffers of a module whose names in the graph are not in `names` to None."""
    for path, owner in held.named_modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and canonical(f"{path}.{name}".lstrip(".")) not in names:
                    tensors[name] = None


def part_of(parameter: nn.Parameter, unit: DeviceMesh | None, layout: Layout | None) -> nn.Parameter:
    """This process's part of a whole parameter, as a copy; all of it if a unit is one process. Collective."""
    if unit is None:
        return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    return nn.Parameter(distribute_tensor(parameter.detach(), unit, layout), parameter.requires_grad)


def moved_to(parameter: DTensor, mesh: DeviceMesh) -> nn.Parameter:
    """The same part of the same whole over another mesh; it shares the memory."""
    whole_size = {"shape": parameter.shape, "stride": parameter.stride()}
    moved = DTensor.from_local(parameter.detach().to_local(), mesh, parameter.placements, run_check=False, **whole_size)
    return nn.Parameter(moved, parameter.requires_grad)
