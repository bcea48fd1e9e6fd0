"""Plans the memory of a run on a device: each part in bytes with its formula in words, and the peaks.

Pure arithmetic on shapes and counts; nothing is measured or loaded.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hybrid_engine.config.blocks import ZERO_STAGES, StageRules

STATE_BYTES = 8
"""Bytes of Adam's two fp32 moments per trained value."""
STEP_BYTES = 4
"""Bytes of Adam's fp32 step count per parameter."""
MASTER_BYTES = 4
KV_WORKSPACE, OPTIMIZER_STATE = "KV workspace", "optimizer state"
"""Names of these parts."""
PREFILL, LOGITS, OWN_CACHE = "prefill", "logits", "the model's own cache"
"""Names of the temporary parts of a rollout's passes."""
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class MemoryPart(NamedTuple):
    """A part of a device's memory."""

    name: str
    num_bytes: int
    formula: str
    """Formula of the bytes, in words."""


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
    has_state: bool = True
    """Whether the optimizer has its state in the largest pass; it does not in the first step."""
    fuses_at_once: bool = True
    """Whether a rollout prepares all its weights before it begins, rather than those of a layer at a time."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of the parts that exist during the whole run."""
        return sum(part.num_bytes for role in self.roles for part in role.kept)

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
        left_out = (KV_WORKSPACE,) if has_passes else (KV_WORKSPACE, PREFILL, LOGITS, OWN_CACHE)
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
        if self.generation:
            yield "generating, beside what is kept"
            yield from _lines(self.generation)
        how = "gradients are there in every pass but a step's first" if self.accumulates else "one pass a step"
        how += "" if self.has_state else "; the largest is the first step's, before there is an optimizer state"
        yield f"peak of training:   {format_bytes(self.training_peak_bytes):>10}  ({how})"
        if idle := self.idle_cache_bytes:
            beside = self.training_peak_bytes + idle
            yield f"  with KV workspace {format_bytes(beside):>10}  (which stays between rollouts where there is room)"
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
            "generation": [part._asdict() for part in self.generation],
            "training_peak_bytes": self.training_peak_bytes,
            "generation_peak_bytes": self.generation_peak_bytes,
            "idle_cache_bytes": self.idle_cache_bytes,
        }


def kept_parts(shapes: Sequence[Shape], sharded: Sharded) -> list[MemoryPart]:
    """Returns the weights, and the masters and Adam state of trained ones, on one process."""
    whole, values, trained = (_count(chosen) for chosen in (shapes, shapes, _trained(shapes)))
    held = _on_one_process(shapes, sharded)
    trained = _on_one_process(_trained(shapes), sharded)
    size, share = sharded.dtype_bytes, _share(sharded)
    if sharded.num_processes > 1 and not sharded.rules.shards_parameters and trained:
        shards = f", whole, and {held:,} of them as shards that the optimizer steps"
        parts = [MemoryPart("weights", (whole + held) * size, f"{size} bytes x {values:,} parameters{shards}")]
    else:
        count = held if trained and sharded.num_processes > 1 else whole
        note = share if trained else ""
        packed = [shape for shape in shapes if shape.packed_bytes is not None]
        in_bits = sum(shape.packed_bytes or 0 for shape in packed)
        plain = count - _count(packed)
        also = f", and {_count(packed):,} quantised ones in {in_bits:,} bytes" if packed else ""
        parts = [MemoryPart("weights", plain * size + in_bits, f"{size} bytes x {plain:,} parameters{note}{also}")]
    if not trained:
        return parts
    if size < MASTER_BYTES:
        formula = f"{MASTER_BYTES} bytes x {trained:,} trained parameters{share}"
        parts.append(MemoryPart("masters", trained * MASTER_BYTES, formula))
    state = trained * STATE_BYTES + STEP_BYTES * len(_trained(shapes))
    text = (
        f"2 moments x 4 bytes x {trained:,} trained parameters{share}, and a count for each of {len(_trained(shapes))}"
    )
    return [*parts, MemoryPart(OPTIMIZER_STATE, state, text)]


def gradient_part(shapes: Sequence[Shape], sharded: Sharded) -> MemoryPart:
    """Returns the fp32 gradients that the optimizer steps with, and whole ones that wait for their reduction."""
    trained = _on_one_process(_trained(shapes), sharded)
    num_bytes, text = trained * MASTER_BYTES, f"4 bytes x {trained:,} trained parameters{_share(sharded)}"
    if sharded.rules.shards_optimizer and not sharded.rules.shards_gradients:
        waiting = _count(_trained(shapes)) * sharded.dtype_bytes
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


def read_bytes(text: str, option: str) -> int:
    """Reads a number of bytes such as 24GB, 24GiB, 512 MB or 1e9.

    Raises:
        ValueError: `text` is not a size, or not above 0; names `option`.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    unit = found and UNITS.get(found[2].upper())
    if not found or unit is None or float(found[1]) <= 0 or not math.isfinite(float(found[1])):
        raise ValueError(f"--{option}={text!r} must be a size above 0 such as 24GB, 24GiB or 512MB; give one")
    return round(float(found[1]) * unit)


def format_bytes(count: int) -> str:
    """Formats `count` in the largest binary unit that keeps it above one."""
    if count < 1024:
        return f"{count} B"
    power = min(3, (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def _lines(parts: Iterable[MemoryPart]) -> Iterator[str]:
    for part in parts:
        if part.num_bytes:
            yield f"  {part.name:<18} {format_bytes(part.num_bytes):>10}  {part.formula}"


def _trained(shapes: Iterable[Shape]) -> list[Shape]:
    return [shape for shape in shapes if shape.is_trained]


def _count(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape.dims) for shape in shapes)


def _on_one_process(shapes: Iterable[Shape], sharded: Sharded) -> int:
    """Number of values of a process's shards: equally many rows of each parameter on all, the last shards padded."""
    if not sharded.rules.shards_optimizer:
        return _count(shapes)
    return sum(-(-dims[0] // sharded.num_processes) * math.prod(dims[1:]) for dims, *_ in shapes if dims)


def _share(sharded: Sharded) -> str:
    if not sharded.rules.shards_optimizer:
        return ""
    return f" (ZeRO-{sharded.stage}: a share of {sharded.num_processes})"
