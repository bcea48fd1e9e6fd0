"""Each tensor-parallel rank takes its part of sharded parameters: an exchange in which nobody holds the whole.

FSDP2 keeps rows of every parameter on every process. In one all-to-all per parameter each process sends to
each other the part of its rows that the other's tensor-parallel rank holds, and receives its own part as it
will lie in memory: rows arrive in the order of processes, which is theirs in the parameter. A process sends
and receives a `size`-th of the bytes that a gather would bring it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hybrid_engine.containers.lasting import LastingBuffer
from hybrid_engine.containers.tensor_parallel import Cut, whole
from hybrid_engine.zero.sharding import Sharding


class SliceReader:
    """Reads parts of parameters that lie in shards on all processes; `read` and `wait` are collective.

    Args:
        size: of the groups of consecutive processes that share a model between them.
    """

    def __init__(self, sharding: Sharding, size: int):
        self.sharding, self.size = sharding, size
        self.has_lasting_addresses = False
        """Whether what is read lies where it lay the last time, for recorded steps that read it."""
        self._lasting: dict[tuple[int, Cut | None], tuple[torch.Tensor, LastingBuffer]] = {}
        self._bytes_read = 0
        self._under_way: list[tuple[Any, torch.Tensor]] = []
        self._slices: list[torch.Tensor] = []
        self._kept: dict[tuple[int, Cut | None], torch.Tensor] | None = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside, what was read once is given again without the other processes."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def read(self, parameter: torch.Tensor, cut: Cut | None, rank: int, name: str) -> torch.Tensor:
        """The part of tensor-parallel rank `rank`, this process's; filled once `wait` returns."""
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
        local = parameter.detach().to_local().to(mesh.device_type)  # offloaded shards lie elsewhere
        group = mesh["fsdp"].get_group() if mesh.ndim > 1 else mesh.get_group()
        num_processes = dist.get_world_size(group)
        if num_processes == 1 or not parameter.dim():  # of a scalar every process has all
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
        """Memory for a part of `parameter`: where it lay in the last rollout, or anywhere."""
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
        """Bytes read from other processes' shards and this one's since the last call."""
        count, self._bytes_read = self._bytes_read, 0
        return count

    def wait(self) -> None:
        """Returns when everything that was read is there."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def release(self) -> None:
        """Frees everything that was read; whoever still looks at it finds no storage, or must not read it."""
        self.wait()
        self._lasting = {key: kept for key, kept in self._lasting.items() if kept[1].num_bytes}  # read this time
        for _, buffer in self._lasting.values():
            buffer.release()
        for tensor in self._slices:
            tensor.untyped_storage().resize_(0)
        self._slices.clear()


def _overlap(bound: tuple[int, int], ranges: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """What of `ranges` lies in `bound`."""
    pairs = [(max(start, bound[0]), min(stop, bound[1])) for start, stop in ranges]
    return [(start, stop) for start, stop in pairs if start < stop]


def _part_of_shard(local: torch.Tensor, bound: tuple[int, int], cut: Cut, rank: int) -> torch.Tensor:
    """What of the rows `bound` of a parameter, which are `local`, belongs to `rank`."""
    if cut.dim > 0:
        return cut.of(local, rank)
    parts = [local[start - bound[0] : stop - bound[0]] for start, stop in _overlap(bound, cut.ranges[rank])]
    return torch.cat(parts) if parts else local[:0]


def _num_elements(bound: tuple[int, int], cut: Cut, rank: int, row: int, shape: torch.Size) -> int:
    """The number of elements of a rank's part."""
    ranges = cut.ranges[rank]
    if cut.dim > 0:
        length = sum(stop - start for start, stop in ranges)
        return (bound[1] - bound[0]) * row // shape[cut.dim] * length
    return sum(stop - start for start, stop in _overlap(bound, ranges)) * row
