"""A tensor and its parts: which part of the whole a process holds, and the whole from all parts."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard

from hybrid_engine.extensions.parallelize.values import shown

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


def place_of(tensor: Tensor) -> str:
    """The shape of a tensor and which part of it this process has, in words."""
    if not isinstance(tensor, DTensor):
        return f"all of {list(tensor.shape)}"
    ranges = ", ".join(f"{part.start}:{part.stop}" for part in extent_of(tensor))
    return f"[{ranges}] of {list(tensor.shape)}"


def kind_of(dtype: torch.dtype) -> str:
    """Which numbers a tensor of the dtype has."""
    if dtype == torch.bool:
        return "logical"
    return "complex" if dtype.is_complex else "floating-point" if dtype.is_floating_point else "whole"


def check_values(what: str, given: Tensor, live: Tensor) -> None:
    """ValueError unless `given` has values, of the kind that `live` has: others would be lost or rounded."""
    if given.is_meta or given.layout is not torch.strided:
        raise ValueError(f"{what} must be a dense tensor with values, not one on {given.device} of {given.layout}")
    if kind_of(given.dtype) != kind_of(live.dtype):
        raise ValueError(
            f"{what} has dtype {given.dtype} and the module has {live.dtype}: {kind_of(given.dtype)} numbers are not "
            f"{kind_of(live.dtype)} ones; give what was saved, or convert it before"
        )


def whole_of(parts: Iterable[Any]) -> Tensor:
    """The whole tensor, on the CPU, from what each process has of it; tensors that are no DTensors are whole.

    ValueError where a part is missing, or where they are of tensors of different shapes or dtypes.
    """
    listed = list(parts)
    for part in listed:
        if not isinstance(part, Tensor):
            raise ValueError(f"a process has {shown(part)} in the place of a tensor; they are of two models")
        if (part.shape, part.dtype) != (listed[0].shape, listed[0].dtype):
            found = [f"{one.dtype} of shape {list(one.shape)}" for one in (listed[0], part)]
            raise ValueError(f"parts are {found[0]} and {found[1]}; they are of two models")
    whole = next((part for part in listed if not isinstance(part, DTensor)), None)
    if whole is not None:
        return whole.detach().cpu().clone()
    whole = torch.empty(listed[0].shape, dtype=listed[0].dtype)
    covered = torch.zeros(whole.shape, dtype=torch.bool)
    for part in listed:
        where = extent_of(part)
        whole[where] = part.to_local().detach().cpu()
        covered[where] = True
    if not covered.all():
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
