"""What a process generates with, out of the parts of parameters that the processes of its unit train.

A process trains by a plan, and generates with tensor parallelism's part. Where that lies in what it trains it is read
there, as a view where it is one range. All else that is read until `wait` comes in one gather over the unit, in which a
process gives what it trains, and is cut from that: a copy at an address that lasts, for recorded steps that read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from hybrid_engine.containers.lasting import LastingBuffer
from hybrid_engine.containers.tensor_parallel import Cut, read_whole
from hybrid_engine.distributed.single_tensors import all_gather_single
from hybrid_engine.zero.split_module import tensor_axes

Bounds = tuple[tuple[int, int], ...]
"""For each dimension of a tensor the first index, and the one after the last, of a part."""


@dataclass(frozen=True)
class _Missing:
    """A part that is to be gathered: of which parameter, which part of the whole, and where it goes."""

    parameter: DTensor
    cut: Cut | None
    rank: int
    output: torch.Tensor

    @property
    def kind(self) -> tuple[tuple[str, ...], torch.dtype]:
        """The axes over which the parameter is split, and its dtype: those of one kind are gathered together."""
        names = self.parameter.device_mesh.mesh_dim_names or ()
        axes = zip(names, self.parameter.placements, strict=True)
        return tuple(name for name, placement in axes if isinstance(placement, Shard)), self.parameter.dtype


class PartReader:
    """Reads the parts with which one process generates; `read` is local, `wait` collective over the unit.

    Args:
        places: by the tensor-parallel rank, the place of its process among those over which parameters are split.
    """

    def __init__(self, places: Sequence[int]) -> None:
        self._places = tuple(places)
        self._copies: dict[tuple[int, Cut | None], tuple[DTensor, LastingBuffer]] = {}
        self._missing: list[_Missing] = []
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._bytes_gathered = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies that the last rollout needed, whether they are there now or not."""
        return sum(0 if b.tensor is None else b.tensor.nbytes for _, b in self._copies.values())

    def read(self, parameter: torch.Tensor, cut: Cut | None, rank: int, name: str) -> torch.Tensor:
        """The part of tensor-parallel rank `rank`, this process's; filled once `wait` returns.

        RuntimeError where ZeRO has the parameter shared out.
        """
        if not isinstance(parameter, DTensor):
            return read_whole(parameter, cut, rank, name)
        names = parameter.device_mesh.mesh_dim_names or ()
        if tensor_axes(names) != tuple(names):
            raise RuntimeError(f"{name} is not gathered; gather the weights before binding them")
        local = _local(parameter)
        inside = [self._inside(parameter, cut, other) for other in range(len(self._places))]
        if None in inside:  # on whichever process: all of them gather it, or none does
            output = self._allocate(parameter, cut, part_shape(parameter.shape, cut, rank))
            self._missing.append(_Missing(parameter, cut, rank, output))
            return output
        own = inside[rank]
        assert own is not None
        part = own.of(local, 0) if own.ranges else local
        is_view = part.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        return part if is_view else self._allocate(parameter, cut, part.shape).copy_(part)

    def _inside(self, parameter: DTensor, cut: Cut | None, rank: int) -> Cut | None:
        """See `inside_of`, of the process of `rank`."""
        names = parameter.device_mesh.mesh_dim_names or ()
        mesh = parameter.device_mesh
        held = bounds_of(
            parameter.shape, parameter.placements, mesh.shape, _coordinate(mesh, names, self._places[rank])
        )
        return inside_of(held, cut, rank, parameter.shape)

    def wait(self) -> None:
        """Gathers what was read and is not here; returns when it is."""
        missing, self._missing = self._missing, []
        for kind in dict.fromkeys(one.kind for one in missing):
            self._gather([one for one in missing if one.kind == kind], kind[0])

    def _gather(self, missing: list[_Missing], axes: tuple[str, ...]) -> None:
        mesh = missing[0].parameter.device_mesh
        group = self._group(mesh, axes)
        sent = torch.cat([_local(one.parameter).flatten() for one in missing])
        received = sent.new_empty(dist.get_world_size(group), len(sent))
        # As bytes: not every backend gathers every dtype.
        all_gather_single(received.view(-1).view(torch.uint8), sent.view(torch.uint8), group=group)
        self._bytes_gathered += received.nbytes
        start = 0
        for one in missing:
            local = _local(one.parameter)
            whole = local.new_empty(one.parameter.shape)
            for place, parts in enumerate(received[:, start : start + local.numel()]):
                placements, coordinate = one.parameter.placements, _coordinate(mesh, axes, place)
                where = bounds_of(whole.shape, placements, mesh.shape, coordinate)
                whole[tuple(slice(*bound) for bound in where)] = parts.view(local.shape)
            one.output.copy_(whole if one.cut is None else one.cut.of(whole, one.rank))
            start += local.numel()

    def _group(self, mesh: DeviceMesh, axes: tuple[str, ...]) -> dist.ProcessGroup:
        if axes not in self._groups:
            over = mesh[axes]
            self._groups[axes] = over.get_group() if len(axes) == 1 else over._flatten("unit").get_group()
        return self._groups[axes]

    def _allocate(self, parameter: DTensor, cut: Cut | None, shape: tuple[int, ...]) -> torch.Tensor:
        _, buffer = self._copies.setdefault((id(parameter), cut), (parameter, LastingBuffer()))
        return buffer.take(tuple(shape), parameter.dtype, _local(parameter).device)

    def count_bytes(self) -> int:
        """Bytes gathered from the unit since the last call."""
        count, self._bytes_gathered = self._bytes_gathered, 0
        return count

    def release(self) -> None:
        """Frees all copies; whoever still looks at one must not read it."""
        self._missing.clear()
        self._copies = {key: kept for key, kept in self._copies.items() if kept[1].num_bytes}  # read this time
        for _, buffer in self._copies.values():
            buffer.release()


def places_of_ranks(sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """By tensor-parallel rank, its place in a mesh of these sizes; `order`: its axes, outermost first."""
    return torch.arange(prod(sizes)).view(tuple(sizes)).permute(tuple(order)).flatten().tolist()


def _local(parameter: DTensor) -> torch.Tensor:
    with torch.no_grad():
        return parameter.to_local().detach()


def bounds_of(
    shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int], coordinate: Sequence[int]
) -> Bounds:
    """What the process at `coordinate` of a mesh of these sizes has of a parameter."""
    bounds = [(0, length) for length in shape]
    for size, place, placement in zip(sizes, coordinate, placements, strict=True):
        if isinstance(placement, Shard):
            start, stop = bounds[placement.dim]
            length = -(-(stop - start) // size)
            bounds[placement.dim] = (min(start + place * length, stop), min(start + (place + 1) * length, stop))
    return tuple(bounds)


def _coordinate(mesh: DeviceMesh, axes: tuple[str, ...], place: int) -> tuple[int, ...]:
    """Where the process at `place` of those along `axes` lies in `mesh`; 0 on all other axes."""
    found = []
    for name, size in reversed(list(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))):
        found.append(place % size if name in axes else 0)
        place = place // size if name in axes else place
    return tuple(reversed(found))


def inside_of(held: Bounds, cut: Cut | None, rank: int, shape: Sequence[int]) -> Cut | None:
    """What a rank generates with, as a cut (of rank 0) of the part that it holds; None where that lacks some of it."""
    wanted: list[tuple[tuple[int, int], ...]] = [((0, length),) for length in shape]
    if cut is not None:
        wanted[cut.dim] = cut.ranges[rank]
    for ranges, (start, stop) in zip(wanted, held, strict=True):
        if any(first < start or last > stop for first, last in ranges):
            return None
    if cut is None:
        return Cut(0, ())
    start = held[cut.dim][0]
    return Cut(cut.dim, (tuple((first - start, last - start) for first, last in wanted[cut.dim]),))


def part_shape(shape: Sequence[int], cut: Cut | None, rank: int) -> tuple[int, ...]:
    """The shape of what `rank` generates with of a parameter of `shape`."""
    found = list(shape)
    if cut is not None:
        found[cut.dim] = sum(stop - start for start, stop in cut.ranges[rank])
    return tuple(found)
