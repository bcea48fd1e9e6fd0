"""The memory of a run on one device: parts in bytes, each with its formula in words, and the peaks that they add up to.

Pure arithmetic on shapes and counts; nothing is measured or loaded. `roles.py` makes the parts, `fitting.py` prints
them, and `comparison.py` sets the peaks next to what a run takes.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hybrid_engine.config.blocks import ZERO_STAGES, StageRules
from hybrid_engine.metrics.memory import format_bytes

STATE_BYTES, STEP_BYTES, MASTER_BYTES = 8, 4, 4
"""Bytes of Adam's two fp32 moments per trained value, of its fp32 step count per parameter, and of an fp32 master."""
KV_WORKSPACE, OPTIMIZER_STATE = "KV workspace", "optimizer state"
"""Names of these parts."""
OF_PASSES = ("prefill", "logits", "the model's own cache")
"""Names of the temporary parts of a rollout's passes."""


class MemoryPart(NamedTuple):
    """A part of a device's memory."""

    name: str
    num_bytes: int
    formula: str
    """Formula of the bytes, in words."""


NO_WORKSPACES = MemoryPart("matrix products", 0, "")


class Shape(NamedTuple):
    """Properties of a parameter that determine its memory."""

    dims: tuple[int, ...]
    is_trained: bool
    packed_bytes: int | None = None
    """Bytes of a quantized weight, scales included; None: it has the model's dtype."""


class Sharded(NamedTuple):
    """Sharding of a model over processes."""

    stage: int
    num_processes: int
    dtype_bytes: int
    """Bytes of a value of a weight."""

    @property
    def rules(self) -> StageRules:
        """The rules of the stage; a single process shards nothing at any stage."""
        return ZERO_STAGES[self.stage if self.num_processes > 1 else 0]

    @property
    def in_words(self) -> str:
        """The share of each process, to be added to a formula."""
        return f" (ZeRO-{self.stage}: a share of {self.num_processes})" if self.rules.shards_optimizer else ""

    def num_values(self, shapes: Iterable[Shape]) -> int:
        """Number of values of a process's shards: equally many rows of each parameter, the last shards padded."""
        if not self.rules.shards_optimizer:
            return _count(shapes)
        return sum(-(-dims[0] // self.num_processes) * math.prod(dims[1:]) for dims, *_ in shapes if dims)


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """Memory of one model of a run."""

    name: str
    kept: list[MemoryPart]
    """Parts that exist during the whole run: weights, masters, the optimizer's state."""
    gradients: MemoryPart
    """Gradients, which exist from a step's first backward pass to its end."""
    passing: list[MemoryPart] = field(default_factory=list)
    """Parts that a forward pass stores for its backward pass."""
    pass_peak_bytes: int = 0
    """Peak bytes of a forward and backward pass beyond those that exist when it begins."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory of a run on one of its devices."""

    roles: list[RolePlan]
    """Models in the order in which a step trains them."""
    accumulates: bool
    """Whether a step has several passes, the later of which find gradients."""
    generation: list[MemoryPart]
    """Parts that generation needs in addition to the kept ones; empty if nothing is generated."""
    workspaces: MemoryPart = NO_WORKSPACES
    """Workspaces of the GPU's library of matrix products, which it keeps from its first call on."""
    has_state: bool = True
    """Whether the optimizer has its state in the largest pass; it does not in the first step."""
    fuses_at_once: bool = True
    """Whether a rollout prepares all its weights before it begins, rather than those of a layer at a time."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of the parts that exist during the whole run."""
        return self.workspaces.num_bytes + sum(part.num_bytes for role in self.roles for part in role.kept)

    @property
    def training_peak_bytes(self) -> int:
        """Peak bytes of training: in a pass with the gradients that exist then, or at the step."""
        gradients = [role.gradients.num_bytes for role in self.roles]
        if self.accumulates:
            highest = sum(gradients) + max(role.pass_peak_bytes for role in self.roles)
        else:
            before = [sum(gradients[:index]) for index in range(len(gradients))]
            highest = max(b + role.pass_peak_bytes for b, role in zip(before, self.roles, strict=True))
        if not self.has_state:
            kept = (part for role in self.roles for part in role.kept)
            highest -= sum(part.num_bytes for part in kept if part.name == OPTIMIZER_STATE)
        return self.kept_bytes + max(highest, sum(gradients))

    @property
    def idle_cache_bytes(self) -> int:
        """Bytes of the KV workspace, which is kept during training if memory suffices, and released otherwise."""
        return sum(part.num_bytes for part in self.generation if part.name == KV_WORKSPACE)

    @property
    def generation_peak_bytes(self) -> int:
        """Peak bytes of generation; 0 if nothing is generated."""
        return self.kept_bytes + sum(part.num_bytes for part in self.generation) if self.generation else 0

    def rollout_bytes(self, cache_bytes: int, *, has_passes: bool) -> int:
        """Peak bytes of a rollout with a KV workspace of `cache_bytes`, with or without the parts of its passes."""
        left_out = (KV_WORKSPACE,) if has_passes else (KV_WORKSPACE, *OF_PASSES)
        return self.kept_bytes + cache_bytes + sum(p.num_bytes for p in self.generation if p.name not in left_out)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the run, in training or generation."""
        return max(self.training_peak_bytes, self.generation_peak_bytes)

    def lines(self) -> Iterator[str]:
        """Yields the plan in words."""
        for role in self.roles:
            yield role.name
            yield from _lines([*role.kept, role.gradients, *role.passing])
        if self.workspaces.num_bytes:
            yield "cuBLAS, during the whole run"
            yield from _lines([self.workspaces])
        if self.generation:
            yield "generating, in addition to what is kept"
            yield from _lines(self.generation)
        how = "gradients are there in every pass but a step's first" if self.accumulates else "one pass a step"
        how += "" if self.has_state else "; the largest is the first step's, before there is an optimizer state"
        yield f"peak of training:   {format_bytes(self.training_peak_bytes):>10}  ({how})"
        if idle := self.idle_cache_bytes:
            total = format_bytes(self.training_peak_bytes + idle)
            yield f"  with KV workspace {total:>10}  (which stays between rollouts where there is room)"
        if self.generation:
            yield f"peak of generation: {format_bytes(self.generation_peak_bytes):>10}"

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain values."""
        roles = {
            role.name: [part._asdict() for part in (*role.kept, role.gradients, *role.passing) if part.num_bytes]
            for role in self.roles
        }
        return {
            "roles": roles,
            "workspaces": [self.workspaces._asdict()] if self.workspaces.num_bytes else [],
            "generation": [part._asdict() for part in self.generation],
            "training_peak_bytes": self.training_peak_bytes,
            "generation_peak_bytes": self.generation_peak_bytes,
            "idle_cache_bytes": self.idle_cache_bytes,
        }


def kept_parts(shapes: Sequence[Shape], sharded: Sharded) -> list[MemoryPart]:
    """Returns the weights, and the masters and Adam state of trained ones, on one process."""
    trained = [shape for shape in shapes if shape.is_trained]
    packed = [shape for shape in shapes if shape.packed_bytes is not None]
    packed_bytes, num_plain = sum(shape.packed_bytes or 0 for shape in packed), _count(shapes) - _count(packed)
    size, share, note = sharded.dtype_bytes, sharded.in_words, ""
    if trained and sharded.num_processes > 1:
        shards = sharded.num_values(shapes)
        is_whole = not sharded.rules.shards_parameters
        note = f", whole, and {shards:,} as shards that the optimizer steps" if is_whole else share
        num_plain = shards + (num_plain if is_whole else 0)
    formula = f"{size} bytes x {num_plain:,} parameters{note}"
    formula += f", and {_count(packed):,} quantised ones in {packed_bytes:,} bytes" if packed else ""
    parts = [MemoryPart("weights", num_plain * size + packed_bytes, formula)]
    if not trained:
        return parts
    values = sharded.num_values(trained)
    if size < MASTER_BYTES:
        formula = f"{MASTER_BYTES} bytes x {values:,} trained parameters{share}"
        parts.append(MemoryPart("masters", values * MASTER_BYTES, formula))
    formula = f"2 moments x 4 bytes x {values:,} trained parameters{share}, and a count for each of {len(trained)}"
    return [*parts, MemoryPart(OPTIMIZER_STATE, values * STATE_BYTES + STEP_BYTES * len(trained), formula)]


def gradient_part(shapes: Sequence[Shape], sharded: Sharded) -> MemoryPart:
    """Returns the fp32 gradients that the optimizer steps with, and whole ones that wait for their reduction."""
    trained = [shape for shape in shapes if shape.is_trained]
    values = sharded.num_values(trained)
    num_bytes, text = values * MASTER_BYTES, f"4 bytes x {values:,} trained parameters{sharded.in_words}"
    if sharded.rules.shards_optimizer and not sharded.rules.shards_gradients:
        waiting = _count(trained) * sharded.dtype_bytes
        num_bytes += waiting
        text += f", and {waiting:,} bytes of whole ones that wait for their reduction"
    return MemoryPart("gradients", num_bytes, text)


def kv_part(shape: tuple[int, ...], dtype_bytes: int, running: int) -> MemoryPart:
    """Returns the KV workspace of `[L, 2, num_blocks, K, block_size, D]`, for `running` sequences at once."""
    layers, _, blocks, heads, size, width = shape
    formula = (
        f"{dtype_bytes} bytes x {layers} layers x 2 x {blocks:,} blocks of {size} tokens x {heads} heads x {width}, "
        f"{running} sequences at once"
    )
    return MemoryPart(KV_WORKSPACE, dtype_bytes * math.prod(shape), formula)


def _lines(parts: Iterable[MemoryPart]) -> Iterator[str]:
    for part in parts:
        if part.num_bytes:
            yield f"  {part.name:<18} {format_bytes(part.num_bytes):>10}  {part.formula}"


def _count(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape.dims) for shape in shapes)
