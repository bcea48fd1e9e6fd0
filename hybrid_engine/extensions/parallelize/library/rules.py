"""What the graph knows of one call of an op: its annotation, and which of its arguments say sizes.

A split op runs on parts of its operands, so that arguments that are sizes (of a view, of `h` heads) shrink too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Placement

from hybrid_engine.extensions.parallelize.library.annotations import SUMMED, Annotation


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


@dataclass(frozen=True)
class Call:
    """The arguments of one call, defaults included; tensors are fake ones, which have shapes and dtypes alone."""

    op: torch._ops.OpOverload
    arguments: dict[str, Any]
    outputs: tuple[Tensor, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """The operands, in the order of the arguments; those of lists one by one."""
        return list(tensors_in(list(self.arguments.values())))

    @property
    def shapes(self) -> list[list[int]]:
        """The shapes of the operands."""
        return [list(tensor.shape) for tensor in self.tensors]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def dim(self, name: str = "dim") -> int:
        """The argument `name`, a dimension of the first operand, counted from the front."""
        return self.arguments[name] % max(self.tensors[0].dim(), 1)


def tensors_in(value: Any) -> Iterator[Any]:
    """The tensors, or nodes whose value is a tensor, in nested lists of arguments."""
    if isinstance(value, Tensor) or (isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor)):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors_in(entry)


def arguments_of(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, in the schema's order, with the schema's defaults."""
    found = {}
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args):
            found[argument.name] = args[position]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found


def call_of(node: fx.Node) -> Call:
    """The call that a node of the graph is."""
    assert isinstance(node.target, torch._ops.OpOverload), f"{node.target=}"
    arguments = arguments_of(node.target, node.args, dict(node.kwargs))
    values = fx.node.map_arg(arguments, lambda entry: entry.meta["val"])
    outputs = tuple(tensors_in([node.meta["val"]]))
    return Call(node.target, dict(values), outputs)
