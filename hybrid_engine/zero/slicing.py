"""Readers of a tensor-parallel rank's part of sharded parameters: by an exchange without the whole, or from its unit.

FSDP2 keeps rows of every parameter on every process. In one all-to-all per parameter each process sends to
each other the part of its rows that the other's tensor-parallel rank holds, and receives its own part in its final
memory layout: rows arrive in the order of processes, which is their order in the parameter. A process sends and
receives a `size`-th of the bytes that a gather would bring it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from hybrid_engine.containers.device import LastingBuffer
from hybrid_engine.containers.views import Cut, read_whole, whole
from hybrid_engine.distributed.groups import all_gather_single
from hybrid_engine.zero.sharding import Sharding
from hybrid_engine.zero.split_module import tensor_axes

Bounds = tuple[tuple[int, int], ...]
"""For each dimension of a tensor the first index of a part, and the index after the last."""


class SliceReader:
    """Reads parts of parameters that are sharded over all processes; `read` and `wait` are collective.

    Args:
        size: the number of consecutive processes that share a model.
    """

    def __init__(self, sharding: Sharding, size: int):
        self.sharding, self.size = sharding, size
        self.has_lasting_addresses = False
        """Whether parts are read to the same addresses as the last time, for recorded steps that read them."""
        self._lasting: dict[tuple[int, Cut | None], tuple[torch.Tensor, LastingBuffer]] = {}
        self._bytes_read = 0
        self._under_way: list[tuple[Any, torch.Tensor]] = []
        self._slices: list[torch.Tensor] = []
        self._kept: dict[tuple[int, Cut | None], torch.Tensor] | None = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside, parts that were read once are returned again without the other processes."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def read(self, parameter: torch.Tensor, cut: Cut | None, rank: int, name: str) -> torch.Tensor:
        """The part of tensor-parallel rank `rank`, which is this process's; filled after `wait` returns."""
        if self._kept is None:
            return self._read(parameter, cut, rank, name)
        key = (id(parameter), cut)
        if key not in self._kept:
            self._kept[key] = self._read(parameter, cut, rank, name)
        return self._kept[key]

    def _read(self, parameter: torch.Tensor, cut: Cut | None, rank: int, name: str) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return self._cut_local(parameter, whole(parameter, name), cut, rank)
        mesh = parameter.device_mesh
        local = parameter.detach().to_local().to(mesh.device_type)  # offloaded shards are on the CPU
        group = mesh["fsdp"].get_group() if mesh.ndim > 1 else mesh.get_group()
        num_processes = dist.get_world_size(group)
        if num_processes == 1 or not parameter.dim():  # every process has all of a scalar
            return self._cut_local(parameter, local, cut, rank)
        length = parameter.shape[0]
        per_process = -(-length // num_processes)
        bounds = [(min(p * per_process, length), min((p + 1) * per_process, length)) for p in range(num_processes)]
        here = dist.get_rank(group)
        part = Cut(0, (((0, length),),) * self.size) if cut is None else cut
        ranks = [dist.get_global_rank(group, process) % self.size for process in range(num_processes)]
        pieces = [_part_of_shard(local, bounds[here], part, other).flatten() for other in ranks]
        row = parameter.shape[1:].numel()
        counts = [_num_elements(bound, part, rank, row, parameter.shape) for bound in bounds]
        shape = list(parameter.shape)
        shape[part.dim] = sum(stop - start for start, stop in part.ranges[rank])
        output = self._allocate(parameter, cut, shape, local)
        self._exchange(output, counts, pieces, group)
        return output

    def _cut_local(self, parameter: torch.Tensor, local: torch.Tensor, cut: Cut | None, rank: int) -> torch.Tensor:
        if cut is None:
            return local
        part = cut.of(local, rank)
        if part.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
            return part
        if self.has_lasting_addresses:
            return self._allocate(parameter, cut, list(part.shape), part).copy_(part)
        self._slices.append(part)
        return part

    def _allocate(self, parameter: torch.Tensor, cut: Cut | None, shape: list[int], like: torch.Tensor) -> torch.Tensor:
        """Memory for a part of `parameter`: at the address of the last rollout, or anywhere."""
        if not self.has_lasting_addresses:
            output = torch.empty(shape, dtype=like.dtype, device=like.device)
            self._slices.append(output)
            return output
        _, buffer = self._lasting.setdefault((id(parameter), cut), (parameter, LastingBuffer()))
        return buffer.take(tuple(shape), like.dtype, like.device)

    def _exchange(
        self, output: torch.Tensor, counts: list[int], pieces: list[torch.Tensor], group: dist.ProcessGroup
    ) -> None:
        sent = torch.cat(pieces).view(torch.uint8)  # bytes: not every backend exchanges every dtype
        size = output.element_size()
        work = dist.all_to_all_single(
            output.view(-1).view(torch.uint8),
            sent,
            [count * size for count in counts],
            [piece.numel() * size for piece in pieces],
            group=group,
            async_op=True,
        )
        self._bytes_read += output.nbytes
        self._under_way.append((work, sent))

    def count_bytes(self) -> int:
        """Bytes read from the shards of all processes since the last call."""
        count, self._bytes_read = self._bytes_read, 0
        return count

    def wait(self) -> None:
        """Returns when all reads are complete."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def release(self) -> None:
        """Frees all parts that were read; they must not be used afterwards."""
        self.wait()
        self._lasting = {key: kept for key, kept in self._lasting.items() if kept[1].num_bytes}  # those read this time
        for _, buffer in self._lasting.values():
            buffer.release()
        for tensor in self._slices:
            tensor.untyped_storage().resize_(0)
        self._slices.clear()


def _overlap(bound: tuple[int, int], ranges: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    pairs = [(max(start, bound[0]), min(stop, bound[1])) for start, stop in ranges]
    return [(start, stop) for start, stop in pairs if start < stop]


def _part_of_shard(local: torch.Tensor, bound: tuple[int, int], cut: Cut, rank: int) -> torch.Tensor:
    if cut.dim > 0:
        return cut.of(local, rank)
    parts = [local[start - bound[0] : stop - bound[0]] for start, stop in _overlap(bound, cut.ranges[rank])]
    return torch.cat(parts) if parts else local[:0]


def _num_elements(bound: tuple[int, int], cut: Cut, rank: int, row: int, shape: torch.Size) -> int:
    ranges = cut.ranges[rank]
    if cut.dim > 0:
        length = sum(stop - start for start, stop in ranges)
        return (bound[1] - bound[0]) * row // shape[cut.dim] * length
    return sum(stop - start for start, stop in _overlap(bound, ranges)) * row


@dataclass(frozen=True)
class _Missing:
    """A part that is to be gathered: its parameter, the part of the whole, and its destination."""

    parameter: DTensor
    cut: Cut | None
    rank: int
    output: torch.Tensor

    @property
    def kind(self) -> tuple[tuple[str, ...], torch.dtype]:
        """The axes over which the parameter is split, and its dtype; parts of one kind are gathered together."""
        names = self.parameter.device_mesh.mesh_dim_names or ()
        axes = zip(names, self.parameter.placements, strict=True)
        return tuple(name for name, placement in axes if isinstance(placement, Shard)), self.parameter.dtype


class PartReader:
    """Reads the parts that one process generates with; `read` is local, `wait` collective over the unit.

    Args:
        places: for each tensor-parallel rank, the place of its process among those over which parameters are split.
    """

    def __init__(self, places: Sequence[int]) -> None:
        self._places = tuple(places)
        self._copies: dict[tuple[int, Cut | None], tuple[DTensor, LastingBuffer]] = {}
        self._missing: list[_Missing] = []
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._bytes_gathered = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies that the last rollout needed, whether they are in memory now or not."""
        return sum(0 if b.tensor is None else b.tensor.nbytes for _, b in self._copies.values())

    def read(self, parameter: torch.Tensor, cut: Cut | None, rank: int, name: str) -> torch.Tensor:
        """The part of tensor-parallel rank `rank`, which is this process's; filled after `wait` returns.

        Raises RuntimeError if ZeRO has sharded the parameter.
        """
        if not isinstance(parameter, DTensor):
            return read_whole(parameter, cut, rank, name)
        names = parameter.device_mesh.mesh_dim_names or ()
        if tensor_axes(names) != tuple(names):
            raise RuntimeError(f"{name} is not gathered; gather the weights before binding them")
        local = _local(parameter)
        inside = [self._inside(parameter, cut, other) for other in range(len(self._places))]
        if None in inside:  # on any process: all of them gather it, or none does
            output = self._allocate(parameter, cut, part_shape(parameter.shape, cut, rank))
            self._missing.append(_Missing(parameter, cut, rank, output))
            return output
        own = inside[rank]
        assert own is not None
        part = own.of(local, 0) if own.ranges else local
        is_view = part.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        return part if is_view else self._allocate(parameter, cut, part.shape).copy_(part)

    def _inside(self, parameter: DTensor, cut: Cut | None, rank: int) -> Cut | None:
        names = parameter.device_mesh.mesh_dim_names or ()
        mesh = parameter.device_mesh
        held = bounds_of(
            parameter.shape, parameter.placements, mesh.shape, _coordinate(mesh, names, self._places[rank])
        )
        return inside_of(held, cut, rank, parameter.shape)

    def wait(self) -> None:
        """Gathers the parts that are not local; returns when they are complete."""
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
        """Frees all copies; they must not be used afterwards."""
        self._missing.clear()
        self._copies = {key: kept for key, kept in self._copies.items() if kept[1].num_bytes}  # those read this time
        for _, buffer in self._copies.values():
            buffer.release()


def places_of_ranks(sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """The place of each tensor-parallel rank in a mesh of these sizes; `order`: its axes, outermost first."""
    return torch.arange(prod(sizes)).view(tuple(sizes)).permute(tuple(order)).flatten().tolist()


def _local(parameter: DTensor) -> torch.Tensor:
    with torch.no_grad():
        return parameter.to_local().detach()


def bounds_of(
    shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int], coordinate: Sequence[int]
) -> Bounds:
    """The bounds of the part of a parameter that the process at `coordinate` of a mesh of these sizes holds."""
    bounds = [(0, length) for length in shape]
    for size, place, placement in zip(sizes, coordinate, placements, strict=True):
        if isinstance(placement, Shard):
            start, stop = bounds[placement.dim]
            length = -(-(stop - start) // size)
            bounds[placement.dim] = (min(start + place * length, stop), min(start + (place + 1) * length, stop))
    return tuple(bounds)


def _coordinate(mesh: DeviceMesh, axes: tuple[str, ...], place: int) -> tuple[int, ...]:
    """The coordinate in `mesh` of the process at `place` along `axes`; 0 on all other axes."""
    found = []
    for name, size in reversed(list(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))):
        found.append(place % size if name in axes else 0)
        place = place // size if name in axes else place
    return tuple(reversed(found))


def inside_of(held: Bounds, cut: Cut | None, rank: int, shape: Sequence[int]) -> Cut | None:
    """The part that a rank generates with, as a cut (of rank 0) of the part `held`; None if `held` lacks some of it."""
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
    """The shape of the part that `rank` generates with, of a parameter of `shape`."""
    found = list(shape)
    if cut is not None:
        found[cut.dim] = sum(stop - start for start, stop in cut.ranges[rank])
    return tuple(found)
