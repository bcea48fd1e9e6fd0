"""The conditions that a plan is made for (machine, processes, weights, memory), costs, and peak memory.

All cost functions of the planner take a `Setting` and return a `Cost`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod

import torch

from hybrid_engine.extensions.parallelize.planning.machine import Machine
from hybrid_engine.extensions.parallelize.planning.moving import Layout, moves

ADAM_STATES = 2
"""Number of tensors of a parameter's size that the optimizer keeps."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """How parameters are stored and stepped."""

    is_16_bit: bool = False
    """Whether the module, which was traced in fp32, is trained in 16 bits."""
    has_masters: bool = False
    """Whether the optimizer keeps fp32 copies of 16-bit parameters, and fp32 states."""
    keeps_remainders: bool = False
    """Whether the optimizer keeps only the lower 16 bits of these copies."""

    def itemsize(self, dtype: torch.dtype) -> int:
        """Bytes of an element that was traced in `dtype`, as it is computed."""
        return min(dtype.itemsize, 2) if self.is_16_bit and dtype.is_floating_point else dtype.itemsize

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the computation if the module was traced in `dtype`."""
        return torch.bfloat16 if self.is_16_bit and dtype is torch.float32 else dtype

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the optimizer's states and copies for one element of a parameter."""
        size = self.itemsize(dtype)
        if not (self.has_masters and size == 2):
            return ADAM_STATES * size
        return ADAM_STATES * 4 + (2 if self.keeps_remainders else 4)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Generation with the same weights: a unit holds keys and values of `num_tokens` tokens at once."""

    num_tokens: int
    tensor_parallel: int
    """Number of processes over which weights, keys and values are split during generation."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything that a plan's cost depends on, apart from the graph and the plan."""

    machine: Machine
    plan_ngpus: int = 1
    num_units: int = 1
    use_zero: bool = False
    trains: bool = True
    weights: Weights = Weights()
    num_micro_batches: int = 1
    """Forward and backward passes before each optimizer step."""
    in_flight: int = 1
    """Micro-batches whose activations are kept at once."""
    memory_bytes: float = float("inf")
    """Bytes of one device for everything that is planned."""
    transient_coefficient: float = 2.0
    """Memory for temporary tensors, as a multiple of the largest tensor's size."""
    max_partition_degree: int = 1 << 30
    """Maximum number of processes over which an op is split."""
    generation: Generation | None = None
    is_eager: bool = False
    """Whether layouts can change only at module borders (lowering="eager")."""

    def move_seconds(
        self, num_elements: int, itemsize: int, source: Layout, target: Layout, mesh: Sequence[int]
    ) -> float:
        """Seconds to bring a tensor from one layout to another."""
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
        """Seconds to sum `num_bytes` of gradients over units."""
        kinds = ("reduce_scatter", "all_gather") if self.use_zero else ("all_reduce",)
        return sum(self._over_units(kind, num_bytes) for kind in kinds)

    def _over_units(self, kind: str, num_bytes: float) -> float:
        """Seconds of a collective over units without its latency: all gradients are reduced at once."""
        size, machine = self.num_units, self.machine
        if size == 1:
            return 0.0
        some, none = (machine.collective_seconds(kind, n, size, self.plan_ngpus) for n in (num_bytes, 0))
        return some - none


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A cost for one rank: seconds of one micro-batch, `reduction_s` once per step, and bytes."""

    compute_s: float = 0.0
    communication_s: float = 0.0
    reduction_s: float = 0.0
    resident_bytes: float = 0.0
    """Parameters and their optimizer states."""
    gradient_bytes: float = 0.0
    stepping_bytes: float = 0.0
    """Additional bytes while gradients are summed over units and the optimizer steps."""
    copied_bytes: float = 0.0
    """Copies of parts of parameters that generation reads in another layout, for its duration."""
    kept_bytes: float = 0.0
    """Kept from the forward pass of a micro-batch to its backward pass."""
    again_bytes: float = 0.0
    """Kept while a recomputed module runs backward."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(**{f: getattr(self, f) + getattr(other, f) for f in FIELDS})

    def times(self, factor: float) -> "Cost":
        """The cost multiplied by `factor`."""
        return Cost(**{f: getattr(self, f) * factor for f in FIELDS})

    def seconds(self, num_micro_batches: int) -> float:
        """Seconds of an optimizer step."""
        return num_micro_batches * (self.compute_s + self.communication_s) + self.reduction_s


FIELDS = tuple(f.name for f in fields(Cost))


ZERO = Cost()


def peaks(cost: Cost, largest: float, setting: Setting, constants: float = 0.0) -> dict[str, float]:
    """Peak bytes of one rank by moment of a step. `constants`: additional bytes of generation."""
    if not setting.trains:
        return {"forward": cost.resident_bytes + setting.transient_coefficient * largest}
    gradients_too = cost.gradient_bytes if setting.num_micro_batches > 1 else 0.0
    found = {
        "backward": cost.resident_bytes
        + gradients_too
        + setting.in_flight * cost.kept_bytes
        + cost.again_bytes
        + setting.transient_coefficient * largest,
        "step": cost.resident_bytes + cost.gradient_bytes + cost.stepping_bytes,
    }
    if setting.generation is not None:
        found["generation"] = cost.resident_bytes + cost.copied_bytes + constants
    return found
