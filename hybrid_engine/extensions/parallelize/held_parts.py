"""The parameters and buffers that one process holds of a module: its parts, over the mesh of its unit."""

from collections.abc import Callable, Collection

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from hybrid_engine.extensions.parallelize.planning.moving import Layout


def leave_out(held: nn.Module, names: Collection[str], canonical: Callable[[str], str]) -> None:
    """Puts None in the place of the parameters and buffers of a module whose name in the graph is none of `names`."""
    for path, owner in held.named_modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and canonical(f"{path}.{name}".lstrip(".")) not in names:
                    tensors[name] = None


def part_of(parameter: nn.Parameter, unit: DeviceMesh | None, layout: Layout | None) -> nn.Parameter:
    """This process's part of a whole parameter, as a copy; all of it where a unit is one process. Collective."""
    if unit is None:
        return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    return nn.Parameter(distribute_tensor(parameter.detach(), unit, layout), parameter.requires_grad)


def moved_to(parameter: DTensor, mesh: DeviceMesh) -> nn.Parameter:
    """The same part of the same whole over another mesh; it shares the memory."""
    whole_size = {"shape": parameter.shape, "stride": parameter.stride()}
    moved = DTensor.from_local(parameter.detach().to_local(), mesh, parameter.placements, run_check=False, **whole_size)
    return nn.Parameter(moved, parameter.requires_grad)
