"""A tensor and its parts: which part of the whole a process holds, and the whole from all parts."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard

# So that `torch.load` reads each rank's own `state_dict()` under torch 2.11 too; 2.12 and later know it by themselves.
torch.serialization.add_safe_globals([_StridedShard])


def extent(
    shape: Sequence[int], sizes: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[slice, ...]:
    """Where the part of the process at `coordinate` of a mesh of `sizes` lies in a tensor of `shape`.

    The axes of the plan divide it first, from left to right; FSDP2 divides those parts, which DTensor calls strided.
    """
    ranges = [(0, size) for size in shape]
    sharded = [axis for axis, placement in enumerate(placements) if hasattr(placement, "dim")]
    for axis in sorted(sharded, key=lambda axis: hasattr(placements[axis], "split_factor")):
        dim = placements[axis].dim  # type: ignore[attr-defined]
        start, stop = ranges[dim]
        length = -(-(stop - start) // sizes[axis])
        ranges[dim] = tuple(min(start + length * number, stop) for number in (coordinate[axis], coordinate[axis] + 1))
    return tuple(slice(*bounds) for bounds in ranges)


def extent_of(tensor: DTensor) -> tuple[slice, ...]:
    """Where this process's part of a sharded tensor lies in the whole; also of one that was loaded from a file."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, f"{mesh=} without this process"
    return extent(tensor.shape, mesh.shape, coordinate, tensor.placements)


def whole_of(parts: Iterable[Tensor]) -> Tensor:
    """The whole tensor, on the CPU, from what each process has of it; tensors that are no DTensors are whole.

    ValueError where a part is missing, or where they are of tensors of different shapes.
    """
    whole: Tensor | None = None
    covered: Tensor | None = None
    for part in parts:
        if not isinstance(part, DTensor):
            return part.detach().cpu().clone()
        if whole is None or covered is None:
            whole = torch.empty(part.shape, dtype=part.dtype)
            covered = torch.zeros(part.shape, dtype=torch.bool)
        if part.shape != whole.shape:
            raise ValueError(f"parts are of shapes {list(whole.shape)} and {list(part.shape)}; they are of two models")
        where = extent_of(part)
        whole[where] = part.to_local().detach().cpu()
        covered[where] = True
    if whole is None or covered is None or not covered.all():
        raise ValueError("a process's part of a tensor is missing; give the state dicts of all processes")
    return whole


def part_like(whole: Tensor, like: Tensor) -> Tensor:
    """The part of `whole` that this process has of `like`, of a tensor of the same shape: sharded as that one is."""
    if not isinstance(like, DTensor):
        return whole.to(like.device, copy=True)
    local = whole[extent_of(like)].to(like.device, copy=True).contiguous()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def local_part(tensor: Tensor) -> Tensor:
    """This process's part, which shares the tensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
