"""Tensor parallelism: which part of every weight a rank holds, and how the ranks combine their results.

Projections into heads or into the MLP are split by columns, those back to the residual stream by rows, whose partial
sums are added over the ranks (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053, section 3); embedding and LM head are
split by vocabulary. Norms, routers and positions are whole on every rank.

Containers do not use process groups: `TensorParallel` gives them functions. H query heads, K key/value heads, D head
dimension.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

Ranges = tuple[tuple[tuple[int, int], ...], ...]
"""Ascending ranges (start, stop) that each rank holds."""


@dataclass(frozen=True)
class Cut:
    """Part of a tensor that each rank holds: ranges of its dimension `dim`."""

    dim: int
    ranges: Ranges

    def of(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Returns the part of `rank`: a view if it is one range, otherwise a copy."""
        parts = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def whole(parameter: torch.Tensor, name: str) -> torch.Tensor:
    """Returns a detached alias of a parameter that is whole in memory.

    Raises RuntimeError for a shard or freed storage.
    """
    if isinstance(parameter, DTensor) or parameter.is_meta or parameter.untyped_storage().nbytes() == 0:
        raise RuntimeError(f"{name} is not gathered; gather the weights before binding them")
    return parameter.detach()


def read_whole(parameter: torch.Tensor, cut: Cut | None, rank: int, name: str) -> torch.Tensor:
    """Returns the part of `rank` of a parameter that is whole in memory; all of it without a cut."""
    weight = whole(parameter, name)
    return weight if cut is None else cut.of(weight, rank)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _nothing_to_wait_for() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """One rank of a tensor-parallel group. All functions but `wait` are collective if `size` is above 1."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = _unchanged
    """Returns the sum over the ranks, bitwise equal on each; may overwrite its argument."""
    all_gather: Callable[[torch.Tensor], torch.Tensor] = _unchanged
    """Concatenates the ranks' tensors of one shape along the last dimension, in the order of ranks."""
    read: Callable[[torch.Tensor, Cut | None, int, str], torch.Tensor] = read_whole
    """Returns a rank's part of a parameter; the string names it in errors. Filled once `wait` returns."""
    wait: Callable[[], None] = _nothing_to_wait_for
    """Returns once all parts that were read are filled."""
    option: str = "tp_size"
    """The user's option for `size`."""

    def take(self, parameter: torch.Tensor, cut: Cut | None, name: str) -> torch.Tensor:
        """Returns this rank's part of a parameter; all of it without a cut."""
        return self.read(parameter, cut, self.rank, name)

    @property
    def is_first(self) -> bool:
        """Whether this rank adds the terms that must be added once."""
        return self.rank == 0

    def even(self, length: int, offset: int = 0) -> Ranges | None:
        """Equal ranges of `[offset, offset + length)` for the ranks; None with a single rank."""
        size = length // self.size
        parts = tuple(((offset + rank * size, offset + (rank + 1) * size),) for rank in range(self.size))
        return parts if self.size > 1 else None

    def chunks(self, length: int) -> Ranges | None:
        """Ranges of `length`, of which the last ranks' may be shorter; None with a single rank."""
        size = -(-length // self.size)
        bounds = [(min(rank * size, length), min((rank + 1) * size, length)) for rank in range(self.size)]
        return tuple((bound,) for bound in bounds) if self.size > 1 else None


ALONE = TensorParallel()


def join(*parts: Ranges | None) -> Ranges | None:
    """Joins each rank's ranges of several parts of one tensor, which must follow each other."""
    present = [part for part in parts if part is not None]
    return tuple(sum(ranks, ()) for ranks in zip(*present, strict=True)) if present else None


def cut(dim: int, ranges: Ranges | None) -> Cut | None:
    """Returns a cut, or None without ranges."""
    return None if ranges is None else Cut(dim, ranges)


@dataclass(frozen=True)
class Heads:
    """Query and key/value heads of a whole attention and of this rank's part of it.

    With fewer key/value heads than ranks, each is held by `size / K` of them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    parallel: TensorParallel = ALONE

    @property
    def local(self) -> tuple[int, int, int]:
        """H, K and D of this rank."""
        size = self.parallel.size
        return self.num_heads // size, max(1, self.num_kv_heads // size), self.head_dim

    def first_kv_head(self, rank: int) -> int:
        """Index of the first key/value head of `rank`."""
        return rank * self.num_kv_heads // self.parallel.size

    def queries(self, width: int = 0, offset: int = 0) -> Ranges | None:
        """Each rank's rows of the query heads, `width` (default D) for each head; width 1 for one number per head."""
        width = width or self.head_dim
        return self.parallel.even(self.num_heads * width, offset)

    def keys(self, offset: int = 0, width: int = 0) -> Ranges | None:
        """Each rank's rows of the key heads, or of the value heads at `offset`."""
        if self.parallel.size == 1:
            return None
        width, num_local = width or self.head_dim, self.local[1]
        firsts = [self.first_kv_head(rank) for rank in range(self.parallel.size)]
        return tuple(((offset + first * width, offset + (first + num_local) * width),) for first in firsts)

    def blocks(self) -> Ranges | None:
        """Each rank's rows of one projection [q | k | v]."""
        first_key, first_value = self.num_heads * self.head_dim, (self.num_heads + self.num_kv_heads) * self.head_dim
        return join(self.queries(), self.keys(first_key), self.keys(first_value))

    def groups(self) -> Ranges | None:
        """Each rank's rows of one projection in which queries, key and value of each key/value head are adjacent."""
        size, dim = self.parallel.size, self.head_dim
        if size == 1:
            return None
        num_queries, num_local = self.num_heads // self.num_kv_heads, self.local[0]
        if self.num_kv_heads >= size:
            return self.parallel.even(self.num_kv_heads * (num_queries + 2) * dim)
        ranges = []
        for rank in range(size):
            head = self.first_kv_head(rank)
            start, first = head * (num_queries + 2), rank * num_local - head * num_queries
            queries = ((start + first) * dim, (start + first + num_local) * dim)
            ranges.append((queries, ((start + num_queries) * dim, (start + num_queries + 2) * dim)))
        return tuple(ranges)


def check_divides(heads: Heads, mlp_sizes: Sequence[int]) -> None:
    """Raises ValueError, which lists the valid sizes, if the ranks cannot share heads and MLP equally."""
    num_heads, num_kv_heads, size = heads.num_heads, heads.num_kv_heads, heads.parallel.size

    def works(size: int) -> bool:
        shares_keys = num_kv_heads % size == 0 or size % num_kv_heads == 0
        return num_heads % size == 0 and shares_keys and all(length % size == 0 for length in mlp_sizes)

    if not works(size):
        choices = ", ".join(str(n) for n in range(1, num_heads + 1) if works(n))
        lengths = " and ".join(map(str, sorted(set(mlp_sizes))))
        raise ValueError(
            f"{heads.parallel.option}={size} must divide num_attention_heads={num_heads}"
            f"{f' and the MLP size {lengths}' if lengths else ''}, and divide num_key_value_heads={num_kv_heads} or be "
            f"a multiple of it; use one of {choices}"
        )
