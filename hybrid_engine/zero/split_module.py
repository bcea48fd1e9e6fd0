"""Modules whose parameters are split over several processes before an engine shares them out."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

TENSOR = "tensor"
"""The axis of a mesh over which such parameters are split."""
STAGES = "stages"
"""The axis over which the stages of such modules are dealt out."""


@runtime_checkable
class SplitModule(Protocol):
    """A module that consecutive processes, a unit, compute together; its parameters are DTensors over them."""

    unit_size: int
    """Processes of a unit."""

    def adopt(self, mesh: DeviceMesh) -> None:
        """Puts the parts over `mesh`, of the processes of this unit, in the place of the mesh that they were over."""

    def together(self) -> AbstractContextManager[None]:
        """Around a pass: an error inside is raised on all processes of the unit, which may be parted then."""


@runtime_checkable
class StagedModule(SplitModule, Protocol):
    """A split module of which a process holds one stage of a pipeline; consecutive processes share a stage."""

    num_stages: int

    def original(self) -> nn.Module:
        """The module that it was made from, with this process's parameters; those of other stages are on meta."""

    def stages_of(self, path: str) -> frozenset[int]:
        """The stages that hold parameters of the original's module at `path`."""


def is_split_class(module_class: type) -> bool:
    """Whether objects of a class are such modules."""
    return hasattr(module_class, "unit_size") and hasattr(module_class, "adopt")


def unit_size_of(module: nn.Module | None) -> int:
    """How many processes compute `module` together; 1 for a module that each has for itself."""
    return module.unit_size if isinstance(module, SplitModule) else 1


def together(module: nn.Module) -> AbstractContextManager[None]:
    """Around a pass of `module`, an error in which is raised on all processes that compute it together."""
    return module.together() if isinstance(module, SplitModule) else nullcontext()


def num_stages_of(module: nn.Module | None) -> int:
    """How many stages `module` is dealt out to; 1 where every process of a unit has a part of everything."""
    return module.num_stages if isinstance(module, StagedModule) else 1


def num_copies(parameter: nn.Parameter) -> int:
    """How many processes of a unit have the same part of a parameter."""
    if not isinstance(parameter, DTensor) or TENSOR not in (parameter.device_mesh.mesh_dim_names or ()):
        return 1
    axis = (parameter.device_mesh.mesh_dim_names or ()).index(TENSOR)
    return parameter.device_mesh.size(axis) if parameter.placements[axis].is_replicate() else 1


def num_gathered(parameter: nn.Parameter) -> int:
    """The elements of a parameter that its process computes with when all others of ZeRO have given theirs."""
    if not isinstance(parameter, DTensor) or TENSOR not in (parameter.device_mesh.mesh_dim_names or ()):
        return parameter.numel()
    axis = (parameter.device_mesh.mesh_dim_names or ()).index(TENSOR)
    return parameter.numel() // (parameter.device_mesh.size(axis) // num_copies(parameter))
