"""What a plan is made for: the machine, the processes, how weights are kept, how much memory there is."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from hybrid_engine.extensions.parallelize.planning.machine import Machine
from hybrid_engine.extensions.parallelize.planning.moving import Layout, moves

ADAM_STATES = 2
"""Tensors of a parameter's size that the optimizer keeps."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """How parameters are kept and stepped."""

    is_16_bit: bool = False
    """Whether the module, which was traced in fp32, is trained in 16 bits."""
    has_masters: bool = False
    """Whether the optimizer keeps fp32 copies of 16-bit parameters, and fp32 states."""
    keeps_remainders: bool = False
    """Whether of these copies it keeps the lower 16 bits alone."""

    def itemsize(self, dtype: torch.dtype) -> int:
        """Bytes of an element of `dtype` as it is computed with."""
        return min(dtype.itemsize, 2) if self.is_16_bit and dtype.is_floating_point else dtype.itemsize

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What is computed in, where the module was traced in `dtype`."""
        return torch.bfloat16 if self.is_16_bit and dtype is torch.float32 else dtype

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the optimizer's states, and of its copies, for an element of a parameter."""
        size = self.itemsize(dtype)
        if not (self.has_masters and size == 2):
            return ADAM_STATES * size
        return ADAM_STATES * 4 + (2 if self.keeps_remainders else 4)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What the same weights need to generate: `num_tokens` with keys and values at once in a unit."""

    num_tokens: int
    tensor_parallel: int
    """Processes that share out weights, keys and values while generating."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All that a plan's cost depends on beside the graph and the plan."""

    machine: Machine
    plan_ngpus: int = 1
    num_units: int = 1
    use_zero: bool = False
    trains: bool = True
    weights: Weights = Weights()
    num_micro_batches: int = 1
    """Forward and backward passes before each step of the optimizer."""
    in_flight: int = 1
    """Micro-batches whose activations are kept at once."""
    memory_bytes: float = float("inf")
    """Of one device, for all that is planned."""
    transient_coefficient: float = 2.0
    """How many tensors of the size of the largest are there at once beside those that are kept."""
    max_partition_degree: int = 1 << 30
    """The most processes over which an op is split."""
    generation: Generation | None = None
    is_eager: bool = False
    """Whether layouts may change at borders of modules alone (lowering="eager")."""

    def move_seconds(
        self, num_elements: int, itemsize: int, source: Layout, target: Layout, mesh: Sequence[int]
    ) -> float:
        """The time that it takes to bring a tensor from one layout to another."""
        total = 0.0
        for move in moves(num_elements, source, target, tuple(mesh)):
            num_bytes = move.num_elements * itemsize
            if move.kind == "copy":
                total += self.machine.device.seconds(0, 2 * num_bytes, torch.float32)
            else:
                stride = prod(mesh[move.axis + 1 :])
                total += self.machine.collective_seconds(move.kind, num_bytes, mesh[move.axis], stride)
        return total

    def reduction_seconds(self, num_bytes: float) -> float:
        """The time that it takes to sum `num_bytes` of gradients over units."""
        kinds = ("reduce_scatter", "all_gather") if self.use_zero else ("all_reduce",)
        return sum(self._over_units(kind, num_bytes) for kind in kinds)

    def _over_units(self, kind: str, num_bytes: float) -> float:
        """Gradients are reduced in one go: no parameter pays for latency by itself."""
        size, machine = self.num_units, self.machine
        if size == 1:
            return 0.0
        some, none = (machine.collective_seconds(kind, n, size, self.plan_ngpus) for n in (num_bytes, 0))
        return some - none
