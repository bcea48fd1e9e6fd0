"""The one interface between the engine and a module whose parameters a plan has split over several processes.

`parallelize` makes such modules. All rooms of the core ask through the functions here, which also accept modules that
are not split; only this file reads the members of the two protocols.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from hybrid_engine.config import EngineConfig
from hybrid_engine.distributed.groups import axis_name

TENSOR = "tensor"
"""Prefix of the names of mesh axes over which such parameters are split."""
STAGES = "stages"
"""The axis over which pipeline stages are distributed."""


@dataclass(frozen=True, kw_only=True)
class BatchTraining:
    """The backward passes of the micro-batches that run through stages together."""

    loss: Callable[[Any, int], Tensor]
    """The loss of a micro-batch, from the module's result and the micro-batch's index; called on the last stage."""
    scale: Callable[[Tensor], Tensor]
    """The value that the backward pass starts from, from the loss."""
    parameters: Mapping[str, nn.Parameter]
    """The trained parameters by name. Gradients of those that several stages hold are summed over the stages."""


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

    def stages_of(self, name: str) -> frozenset[int]:
        """The stages that hold parameters of the original module's part, or the parameter, of that name."""

    def run_batches(self, batches: Sequence[Any], training: BatchTraining | None = None) -> list[Any]:
        """The results of micro-batches, all of one step; with `training` their losses instead, with backward passes.

        A micro-batch is a mapping of arguments of forward by name, or its first argument. All processes of the unit get
        the results, or losses. Collective; an error of one process is raised on all.
        """


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


def original_of(module: nn.Module) -> nn.Module:
    """The module that `module` was made from if a plan runs instead of its forward, else `module`."""
    return module.original() if isinstance(module, SplitModule) else module


def split_axes_of(module: nn.Module) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of the axes over which a plan has split parameters, and the order of these axes: see `SplitModule`."""
    return (module.split_sizes, module.split_order) if isinstance(module, SplitModule) else ((), ())


def adopt(module: nn.Module, mesh: DeviceMesh | None) -> None:
    """Moves the parts of a module that is split to `mesh`, over the same processes; does nothing without a mesh."""
    if isinstance(module, SplitModule) and mesh is not None:
        module.adopt(mesh)


def tensor_names(num_axes: int) -> tuple[str, ...]:
    """The names of `num_axes` axes over which parameters are split."""
    names = (TENSOR,) if num_axes == 1 else tuple(f"{TENSOR}{axis}" for axis in range(num_axes))
    return tuple(map(axis_name, names))


def tensor_axes(names: Sequence[str] | None) -> tuple[str, ...]:
    """The entries of `names`, names of a mesh's axes, over which parameters are split."""
    return tuple(name for name in names or () if name.startswith(TENSOR))


def num_stages_of(module: nn.Module | None) -> int:
    """Number of stages that `module` is distributed over; 1 if every process of a unit has a part of everything."""
    return module.num_stages if isinstance(module, StagedModule) else 1


def stages_of(module: nn.Module, name: str) -> frozenset[int]:
    """The stages that hold parameters of the original module's part, or the parameter, of that name."""
    return module.stages_of(name) if isinstance(module, StagedModule) else frozenset({0})


def run_batches(module: nn.Module, batches: Sequence[Any], training: BatchTraining | None = None) -> list[Any]:
    """Runs the micro-batches of one step through a module in stages: see `StagedModule`."""
    assert isinstance(module, StagedModule), f"{type(module)=}"
    return module.run_batches(batches, training)


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
