"""Protocols of modules whose parameters a plan has split over several processes, and helpers that query them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, Protocol, TypeGuard, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from hybrid_engine.config import EngineConfig
from hybrid_engine.distributed.groups import axis_name

TENSOR = "tensor"
"""Prefix of the names of mesh axes over which such parameters are split."""
STAGES = "stages"
"""The axis over which pipeline stages are distributed."""


@runtime_checkable
class SplitModule(Protocol):
    """A module that a unit of consecutive processes computes together; its parameters are DTensors over the unit."""

    unit_size: int
    """Number of processes of a unit."""
    split_sizes: tuple[int, ...]
    """Sizes of the axes over which parameters are split, outermost first."""
    split_order: tuple[int, ...]
    """The indices of these axes, in descending order of the number of parameter elements that they split."""

    def adopt(self, mesh: DeviceMesh) -> None:
        """Moves the parts to `mesh`, over the processes of this unit, in place of their previous mesh."""

    def together(self) -> AbstractContextManager[None]:
        """Wraps a pass: an error inside is raised on all processes of the unit, which may be out of step after it."""

    runs_graph: bool
    """Whether a graph runs instead of the forward of the module that this was made from."""

    def original(self) -> nn.Module:
        """The module that this was made from, with this process's parameters; itself if its own forward runs.

        Parameters that this process has no part of are on meta.
        """

    def check_engine(self, config: EngineConfig) -> None:
        """Raises ValueError if no engine with this config can train the module; local."""


@runtime_checkable
class StagedModule(SplitModule, Protocol):
    """A split module of which each process holds one pipeline stage; consecutive processes share a stage."""

    num_stages: int

    def build_batches(self, optimizer: Any) -> Any:
        """`Batches` of `optim/accumulation.py` for an engine with this optimizer, all of a step at once. Collective."""

    def stages_of(self, path: str) -> frozenset[int]:
        """The stages that hold parameters of the original module at `path`."""


def is_split_class(module_class: type) -> bool:
    """Whether objects of a class are split modules."""
    return hasattr(module_class, "unit_size") and hasattr(module_class, "adopt")


def check_split(model: nn.Module, config: EngineConfig) -> None:
    """Raises ValueError for a model that is split, or has split parts, in a way that no engine trains; local."""
    if not isinstance(model, nn.Module):
        return  # another check refuses it
    for name, part in model.named_modules():
        if not is_split_class(type(part)):
            continue
        if part is not model:
            raise ValueError(f"model.{name} is parallel and the model is not; parallelize the whole model")
        part.check_engine(config)


def unit_size_of(module: nn.Module | None) -> int:
    """Number of processes that compute `module` together; 1 for a module that is not split."""
    return module.unit_size if isinstance(module, SplitModule) else 1


def together(module: nn.Module) -> AbstractContextManager[None]:
    """Wraps a pass of `module`: an error inside is raised on all processes that compute it together."""
    return module.together() if isinstance(module, SplitModule) else nullcontext()


def runs_graph(module: nn.Module) -> bool:
    """Whether a plan's graph runs instead of the forward of the module that `module` was made from."""
    return isinstance(module, SplitModule) and module.runs_graph


def original_of(module: nn.Module) -> nn.Module:
    """The module that `module` was made from if a plan runs instead of its forward, else `module`."""
    return module.original() if isinstance(module, SplitModule) else module


def tensor_names(num_axes: int) -> tuple[str, ...]:
    """The names of `num_axes` axes over which parameters are split."""
    names = (TENSOR,) if num_axes == 1 else tuple(f"{TENSOR}{axis}" for axis in range(num_axes))
    return tuple(map(axis_name, names))


def tensor_axes(names: Sequence[str] | None) -> tuple[str, ...]:
    """The entries of `names`, names of a mesh's axes, over which parameters are split."""
    return tuple(name for name in names or () if name.startswith(TENSOR))


def num_stages_of(module: nn.Module | None) -> int:
    """Number of stages that `module` is distributed over; 1 if every process of a unit has a part of everything."""
    return module.num_stages if is_staged(module) else 1


def is_staged(module: nn.Module | None) -> TypeGuard[StagedModule]:
    """Whether `module` is distributed over more than one stage."""
    return isinstance(module, StagedModule) and module.num_stages > 1


def num_copies(parameter: nn.Parameter) -> int:
    """Number of processes, among those that together hold a model, that have the same part of a parameter.

    Counts the processes of a unit, and those of ZeRO that each have all of a parameter without a dimension.
    """
    return prod(size for size, placement in _over_axes(parameter, with_shards=True) if placement.is_replicate())


def num_gathered(parameter: nn.Parameter) -> int:
    """The elements of a parameter that its process computes with after ZeRO has gathered it."""
    return parameter.numel() // prod(size for size, at in _over_axes(parameter) if not at.is_replicate())


def _over_axes(parameter: nn.Parameter, with_shards: bool = False) -> list[tuple[int, Placement]]:
    """The size and the placement of each axis over which a plan may have split a parameter.

    With `with_shards` also of the axis over which ZeRO shards parameters.
    """
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    wanted = (*tensor_axes(names), *(("fsdp",) if with_shards and "fsdp" in names else ()))
    axes = [names.index(name) for name in wanted]
    return [(mesh.size(axis), parameter.placements[axis]) for axis in axes]
