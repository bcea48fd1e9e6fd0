"""What the graph knows of one call of an op: its annotation, and which of its arguments say sizes.

A split op runs on parts of its operands, so that arguments that are sizes (of a view, of `h` heads) shrink too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Placement

from hybrid_engine.extensions.parallelize.graph.annotations import SUMMED, Annotation


@dataclass(frozen=True, kw_only=True)
class Part:
    """The place of a process among those that share out one dimension in equal parts."""

    index: int
    count: int
    all_reduce: Callable[[Tensor, str], Tensor] | None = None
    """The sum or the maximum ("sum", "max") over all parts, of each element; None where nobody is there to ask."""


@dataclass(frozen=True)
class OnPart:
    """What runs in the place of an op that is split along a dimension in which a part must know where it lies."""

    function: Callable[..., Any]
    """Takes the op's arguments by name, and `part`."""
    num_reductions: int = 0
    """All-reduces of it, forward and backward, each of one number for all that stands in that dimension."""


@dataclass(frozen=True, kw_only=True)
class OpRule:
    """How one call of an op can be split."""

    annotation: Annotation
    """Of its tensors, in the order in which they stand among the arguments."""
    shape_argument: str | None = None
    """The argument that is the shape of the result."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The size of each name of the annotation."""
    keywords: frozenset[str] = frozenset()
    """Arguments that are the size of the annotation's name of the same name."""
    on_part: Mapping[str, OnPart] = field(default_factory=dict)
    """By the name along which it is split, what runs in the op's place; elsewhere the op does."""

    def splits(self, num_parts: int) -> tuple[str, ...]:
        """The names along which this call can be cut into `num_parts` equal parts."""
        return tuple(name for name in self.annotation.candidates if self._divides(name, num_parts))

    def _divides(self, name: str, num_parts: int) -> bool:
        return name == SUMMED or (name in self.sizes and self.sizes[name] > 0 and self.sizes[name] % num_parts == 0)

    def can_split(self, names: Sequence[str | None], mesh: Sequence[int]) -> bool:
        """Whether the call can be split along `names[i]` over axis i of a mesh of sizes `mesh`, one after the other."""
        parts: dict[str, int] = {}
        for name, size in zip(names, mesh, strict=True):
            if name is not None:
                parts[name] = parts.get(name, 1) * size
        return all(name in self.splits(count) for name, count in parts.items())

    def on_part_of(self, names: Sequence[str | None]) -> tuple[OnPart, list[int]] | None:
        """What runs in the op's place where it is split along `names`, and over which axes; None: the op itself."""
        split = [name for name in names if name in self.on_part]
        return (self.on_part[split[0]], [i for i, name in enumerate(names) if name == split[0]]) if split else None  # type: ignore[index]

    def local_arguments(
        self,
        arguments: Mapping[str, Any],
        output_shape: Sequence[int],
        names: Sequence[str | None],
        mesh: Sequence[int],
    ) -> dict[str, Any]:
        """The arguments that are other than `arguments` for one rank, where the whole result has `output_shape`."""
        changed: dict[str, Any] = {}
        if self.shape_argument is not None:
            changed[self.shape_argument] = local_shape(output_shape, self.output_placements(names)[0], mesh)
        for name, size in zip(names, mesh, strict=True):
            if name in self.keywords:
                changed[name] = changed.get(name, arguments[name]) // size
        return changed

    def input_placements(self, names: Sequence[str | None]) -> tuple[tuple[Placement, ...], ...]:
        """For each operand, its placements over the axes of the mesh."""
        return _by_tensor([self.annotation.input_placements(name) for name in names])

    def output_placements(self, names: Sequence[str | None]) -> tuple[tuple[Placement, ...], ...]:
        """For each result, its placements over the axes of the mesh."""
        return _by_tensor([self.annotation.output_placements(name) for name in names])

    def gradient_placements(self, names: Sequence[str | None]) -> tuple[tuple[Placement, ...], ...]:
        """For each operand, the placements of its gradient over the axes of the mesh."""
        return _by_tensor([self.annotation.gradient_placements(name) for name in names])


def _by_tensor(by_axis: Sequence[tuple[Placement, ...]]) -> tuple[tuple[Placement, ...], ...]:
    return tuple(zip(*by_axis, strict=True))


def local_shape(shape: Sequence[int], placements: Sequence[Placement], mesh: Sequence[int]) -> list[int]:
    """The shape of one rank's part of a tensor of `shape`, all parts being equal."""
    local = list(shape)
    for placement, size in zip(placements, mesh, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            local[dim] //= size
    return local
