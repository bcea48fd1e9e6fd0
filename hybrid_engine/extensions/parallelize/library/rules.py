"""How one call of an op can be split: its annotation, and which of its arguments are sizes.

A split op runs on parts of its operands, so that arguments that are sizes (the shape of a view, `h` heads) shrink too.
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
    """The position of a process among those that hold equal parts of one dimension."""

    index: int
    count: int
    all_reduce: Callable[[Tensor, str], Tensor] | None = None
    """The elementwise sum or maximum ("sum", "max") over all parts; None without a process group."""


@dataclass(frozen=True)
class OnPart:
    """A function that replaces an op that is split along a dimension, if a part must know its position."""

    function: Callable[..., Any]
    """Takes the op's arguments by name, and `part`."""
    num_reductions: int = 0
    """Number of its all-reduces, forward and backward, each of a tensor whose split dimension has size 1."""


@dataclass(frozen=True, kw_only=True)
class OpRule:
    """How one call of an op can be split."""

    annotation: Annotation
    """Annotation of the tensors of the call, in the order of the arguments."""
    shape_argument: str | None = None
    """The argument that is the shape of the result."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The size of each name of the annotation."""
    keywords: frozenset[str] = frozenset()
    """Arguments whose value is the size of the annotation's name of the same name."""
    on_part: Mapping[str, OnPart] = field(default_factory=dict)
    """Functions that replace the op, by the name along which it is split; for other names the op itself runs."""

    def splits(self, num_parts: int) -> tuple[str, ...]:
        """Names along which this call can be cut into `num_parts` equal parts."""
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
        """The function for an op split along `names`, and the mesh axes it spans; None for the op itself."""
        split = [name for name in names if name in self.on_part]
        return (self.on_part[split[0]], [i for i, name in enumerate(names) if name == split[0]]) if split else None  # type: ignore[index]

    def local_arguments(
        self,
        arguments: Mapping[str, Any],
        output_shape: Sequence[int],
        names: Sequence[str | None],
        mesh: Sequence[int],
    ) -> dict[str, Any]:
        """The arguments whose values differ on one rank; `output_shape` is the shape of the whole result."""
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
    """The shape of one rank's part of a tensor of `shape`; all parts are equal."""
    local = list(shape)
    for placement, size in zip(placements, mesh, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            local[dim] //= size
    return local


@dataclass(frozen=True)
class Call:
    """The arguments of one call, including defaults. Tensors are fake: they have only shapes and dtypes."""

    op: torch._ops.OpOverload
    arguments: dict[str, Any]
    outputs: tuple[Tensor, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """The operands, in the order of the arguments; the entries of lists one by one."""
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
    """The call that a node of the graph makes."""
    assert isinstance(node.target, torch._ops.OpOverload), f"{node.target=}"
    arguments = arguments_of(node.target, node.args, dict(node.kwargs))
    values = fx.node.map_arg(arguments, lambda entry: entry.meta["val"])
    outputs = tuple(tensors_in([node.meta["val"]]))
    return Call(node.target, dict(values), outputs)
