"""The cache of a model: what its layers keep of the tokens that were fed, in one piece of memory.

A layer keeps tensors per token in blocks, such as keys and values; tensors of fixed size per sequence in slots, such as
the state of a recurrence; both, or neither; or it reads the cache of another layer. `LayerCacheSpec` says which,
`CacheShape` adds the numbers of blocks and slots, and `ModelCache` the memory.

Tensors of the same shape are adjacent in memory, whichever layers they belong to. So one call copies a block of all of
them. In a model whose layers are alike these are the keys of layer 0, its values, the keys of layer 1, and so on.

K heads, D numbers of a head.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hybrid_engine.ops import BlockCopyOp, KVBlocks

GRAIN = 16
"""Bytes that a tensor's part of a block or slot is rounded up to, so that tensors of any dtype can follow it."""


class StateSpec(NamedTuple):
    """A tensor that a slot, or a block, has for a layer."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    """None: the model's."""

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the tensor in a model of `dtype`."""
        return -(-math.prod(self.shape) * (self.dtype or dtype).itemsize // GRAIN) * GRAIN


@dataclass(frozen=True)
class LayerCacheSpec:
    """Tensors in which one layer keeps what it needs of the tokens that were fed."""

    kv: tuple[tuple[int, int], ...] = ()
    """K and D of each tensor that is kept per token: keys and values, or latent vectors alone."""
    state: tuple[StateSpec, ...] = ()
    """The tensors that are kept per sequence."""
    shared_with: int | None = None
    """Index of the layer whose cache this layer reads instead; None: it has its own."""


@dataclass(frozen=True)
class CacheShape:
    """The size of a model's cache; caches of equal shape and dtype have the same layout in memory."""

    specs: tuple[LayerCacheSpec, ...]
    num_blocks: int
    block_size: int
    """Number of tokens of a block."""
    num_slots: int = 0

    @property
    def block_tensors(self) -> list[tuple[int, StateSpec]]:
        """Layer and shape `[K, block_size, D]` of each tensor of a block."""
        return [
            (index, StateSpec((heads, self.block_size, dim)))
            for index, spec in enumerate(self.specs)
            for heads, dim in spec.kv
        ]

    @property
    def slot_tensors(self) -> list[tuple[int, StateSpec]]:
        """Layer and shape of each tensor of a slot."""
        return [(index, state) for index, spec in enumerate(self.specs) for state in spec.state]

    def bytes_per_block(self, dtype: torch.dtype) -> int:
        """Bytes of a block in all layers of a model of `dtype`."""
        return sum(tensor.num_bytes(dtype) for _, tensor in self.block_tensors)

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        """Bytes of a slot in all layers of a model of `dtype`."""
        return sum(tensor.num_bytes(dtype) for _, tensor in self.slot_tensors)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all blocks and slots in a model of `dtype`."""
        return self.num_blocks * self.bytes_per_block(dtype) + self.num_slots * self.bytes_per_slot(dtype)

    def is_within(self, other: "CacheShape") -> bool:
        """Whether a cache of shape `other` has room for all of this one."""
        is_alike = (self.specs, self.block_size) == (other.specs, other.block_size)
        return is_alike and self.num_blocks <= other.num_blocks and self.num_slots <= other.num_slots


class LayerCache(NamedTuple):
    """One layer's part of a cache."""

    blocks: KVBlocks | torch.Tensor | None = None
    """Keys and values; the tensor of a layer that keeps one per token; None if it keeps nothing per token."""
    states: tuple[torch.Tensor, ...] = ()
    """`[num_slots, *shape]` each."""

    @property
    def kv(self) -> KVBlocks:
        """The blocks of a layer that keeps keys and values."""
        assert isinstance(self.blocks, KVBlocks)
        return self.blocks


class ModelCache:
    """The cache of all layers.

    Args:
        memory: `[shape.num_bytes(dtype) or more]` uint8; the contents stay as they are.
    """

    def __init__(self, shape: CacheShape, dtype: torch.dtype, memory: torch.Tensor):
        self.shape, self.dtype, self.memory = shape, dtype, memory[: shape.num_bytes(dtype)]
        self.num_blocks, self.block_size, self.num_slots = shape.num_blocks, shape.block_size, shape.num_slots
        num_block_bytes = shape.num_blocks * shape.bytes_per_block(dtype)
        self._blocks, blocks = self._lay_out(shape.block_tensors, self.num_blocks, 0)
        self._states, states = self._lay_out(shape.slot_tensors, self.num_slots, num_block_bytes)
        own = [LayerCache(_blocks_of(blocks.get(i, [])), tuple(states.get(i, []))) for i in range(len(shape.specs))]
        owners = [i if spec.shared_with is None else spec.shared_with for i, spec in enumerate(shape.specs)]
        self.layers = tuple(own[owner] for owner in owners)
        self._copy = BlockCopyOp()

    @classmethod
    def zeros(cls, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> "ModelCache":
        """Returns a cache with memory of its own, filled with zeros."""
        return cls(shape, dtype, torch.zeros(shape.num_bytes(dtype), dtype=torch.uint8, device=device))

    @property
    def device(self) -> torch.device:
        """Device of the memory."""
        return self.memory.device

    def data_ptr(self) -> int:
        """Address of the memory."""
        return self.memory.data_ptr()

    def _lay_out(
        self, tensors: list[tuple[int, StateSpec]], count: int, start: int
    ) -> tuple[list[torch.Tensor], dict[int, list[torch.Tensor]]]:
        """Places `count` blocks or slots of `tensors`, which have their layer with them, from byte `start` on.

        Returns the groups of equal tensors, `[number of them, count, *shape]`, and the tensors of each layer.
        """
        layers_of: dict[StateSpec, list[int]] = {}
        for layer, spec in tensors:
            layers_of.setdefault(spec, []).append(layer)
        groups = {}
        for spec, layers in layers_of.items():
            shape, dtype = (len(layers), count, *spec.shape), spec.dtype or self.dtype
            values = self.memory[start : start + math.prod(shape) * dtype.itemsize]
            groups[spec] = values.view(dtype).view(shape)
            start += len(layers) * count * spec.num_bytes(self.dtype)
        by_layer: dict[int, list[torch.Tensor]] = {}
        places = dict.fromkeys(groups, 0)
        for layer, spec in tensors:
            by_layer.setdefault(layer, []).append(groups[spec][places[spec]])
            places[spec] += 1
        return list(groups.values()), by_layer

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Copies the first `num_tokens[i]` places of block `sources[i]` to `targets[i]`, `[M]` int64, in all layers.

        No block is the target of one copy and part of another.
        """
        for group in self._blocks:
            self._copy(group, sources, targets, num_tokens)

    def copy_states(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies slot `sources[i]` to `targets[i]` in all layers. `[M]` int64 each."""
        for group in self._states:
            group[:, targets] = group[:, sources]

    def split(self, shapes: list[CacheShape]) -> list["ModelCache"]:
        """Returns caches of `shapes`, one after the other in the memory of this one, which must be large enough."""
        caches, start = [], 0
        for shape in shapes:
            caches.append(ModelCache(shape, self.dtype, self.memory[start:]))
            start += shape.num_bytes(self.dtype)
        return caches


def _blocks_of(tensors: list[torch.Tensor]) -> KVBlocks | torch.Tensor | None:
    if len(tensors) == 2:
        return KVBlocks(*tensors)
    return tensors[0] if tensors else None
