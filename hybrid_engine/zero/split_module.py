"""Modules whose parameters are split over several processes before an engine shares them out."""

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
"""What the names of the axes of a mesh begin with over which such parameters are split."""
STAGES = "stages"
"""The axis over which the stages of such modules are dealt out."""


@runtime_checkable
class SplitModule(Protocol):
    """A module that consecutive processes, a unit, compute together; its parameters are DTensors over them."""

    unit_size: int
    """Processes of a unit."""
    split_sizes: tuple[int, ...]
    """Sizes of the axes over which parameters are split, the outermost first."""
    split_order: tuple[int, ...]
    """Those axes, that one first over which most is split."""

    def adopt(self, mesh: DeviceMesh) -> None:
        """Puts the parts over `mesh`, of the processes of this unit, in the place of the mesh that they were over."""

    def together(self) -> AbstractContextManager[None]:
        """Around a pass: an error inside is raised on all processes of the unit, which may be parted then."""

    runs_graph: bool
    """Whether a graph runs in the place of the forward of the module that it was made from."""

    def original(self) -> nn.Module:
        """The module that it was made from, with this process's parameters; itself where its own forward runs.

        What this process has no part of is on meta.
        """

    def check_engine(self, config: EngineConfig) -> None:
        """ValueError where no engine with this config trains the module; local."""


@runtime_checkable
class StagedModule(SplitModule, Protocol):
    """A split module of which a process holds one stage of a pipeline; consecutive processes share a stage."""

    num_stages: int

    def build_batches(self, training: Any) -> Any:
        """`Batches` of `optim/stepping.py`: the micro-batches of an engine, all of a step at once. Collective."""

    def stages_of(self, path: str) -> frozenset[int]:
        """The stages that hold parameters of the original's module at `path`."""


def is_split_class(module_class: type) -> bool:
    """Whether objects of a class are such modules."""
    return hasattr(module_class, "unit_size") and hasattr(module_class, "adopt")


def check_split(model: nn.Module, config: EngineConfig) -> None:
    """ValueError for a model that is split, or has split parts, in a way that no engine trains; local."""
    if not isinstance(model, nn.Module):
        return  # refused by its kind
    for name, part in model.named_modules():
        if not is_split_class(type(part)):
            continue
        if part is not model:
            raise ValueError(f"model.{name} is parallel and the model is not; parallelize the whole model")
        part.check_engine(config)


def unit_size_of(module: nn.Module | None) -> int:
    """How many processes compute `module` together; 1 for a module that each has for itself."""
    return module.unit_size if isinstance(module, SplitModule) else 1


def together(module: nn.Module) -> AbstractContextManager[None]:
    """Around a pass of `module`, an error in which is raised on all processes that compute it together."""
    return module.together() if isinstance(module, SplitModule) else nullcontext()


def runs_graph(module: nn.Module) -> bool:
    """Whether a plan's graph runs in the place of the forward of the module that `module` was made from."""
    return isinstance(module, SplitModule) and module.runs_graph


def original_of(module: nn.Module) -> nn.Module:
    """The module that `module` was made from where a plan runs in the place of its forward, else `module`."""
    return module.original() if isinstance(module, SplitModule) else module


def tensor_names(num_axes: int) -> tuple[str, ...]:
    """The names of so many axes over which parameters are split."""
    names = (TENSOR,) if num_axes == 1 else tuple(f"{TENSOR}{axis}" for axis in range(num_axes))
    return tuple(map(axis_name, names))


def tensor_axes(names: Sequence[str] | None) -> tuple[str, ...]:
    """Those of the names of a mesh's axes that are of axes over which parameters are split."""
    return tuple(name for name in names or () if name.startswith(TENSOR))


def num_stages_of(module: nn.Module | None) -> int:
    """How many stages `module` is dealt out to; 1 where every process of a unit has a part of everything."""
    return module.num_stages if is_staged(module) else 1


def is_staged(module: nn.Module | None) -> TypeGuard[StagedModule]:
    """Whether `module` is dealt out to more than one stage."""
    return isinstance(module, StagedModule) and module.num_stages > 1


def num_copies(parameter: nn.Parameter) -> int:
    """How many processes of those that together have a model have the same part of a parameter.

    Those of a unit, and of ZeRO those that each have all of one without a dimension.
    """
    return prod(size for size, placement in _over_axes(parameter, with_shards=True) if placement.is_replicate())


def num_gathered(parameter: nn.Parameter) -> int:
    """The elements of a parameter that its process computes with when all others of ZeRO have given theirs."""
    return parameter.numel() // prod(size for size, at in _over_axes(parameter) if not at.is_replicate())


def _over_axes(parameter: nn.Parameter, with_shards: bool = False) -> list[tuple[int, Placement]]:
    """The size and the placement of each axis over which a plan may have split a parameter.

    `with_shards`: and of the axis over which ZeRO shares parameters out.
    """
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    wanted = (*tensor_axes(names), *(("fsdp",) if with_shards and "fsdp" in names else ()))
    axes = [names.index(name) for name in wanted]
    return [(mesh.size(axis), parameter.placements[axis]) for axis in axes]
