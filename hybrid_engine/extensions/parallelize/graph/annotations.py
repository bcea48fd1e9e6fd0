"""Annotations such as `"m k+, n k+ -> m n"`, which name each dimension and say how an op can be split.

| token | meaning |
|---|---|
| `m` | may be split: each rank computes its part of every result that has it |
| `k+` | is summed over: each rank's result is a partial sum |
| `k^` | must not be split |
| `*` | all leading dimensions that the other tokens do not cover, named `*0`, `*1`, ... |
| `(h d)` | one dimension made of several; all sizes but one are keywords of those names. The first name may be split |
| `?` | not a tensor, or a tensor that every rank holds whole |
| `1` | a dimension of size 1 |
| a lone `+` | the tensor is a term of a sum: if the op gives partial sums, it is a partial sum too |

The interface is nnScaler's (`register_op`). The lone `+` is an addition: it lets a bias be added once to a summed
product.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

TOKEN = re.compile(r"\(([^()]*)\)([+^]?)|(\*)([+^]?)|([A-Za-z]\w*)([+^]?)|(1)|(\+)|(\?)|(\S+)")
SUMMED = "+"
"""The name of the split that takes partial sums and returns partial sums."""


@dataclass(frozen=True)
class Dim:
    """One dimension of a tensor: the names it is made of, outermost first; none for a dimension of size 1."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class TensorPattern:
    """One operand or result: its dimensions (None for `?`), and whether it is a term of a sum."""

    dims: tuple[Dim, ...] | None
    is_term: bool = False

    def placement(self, name: str, is_summed: bool) -> Placement:
        """The tensor's placement if the op is split along `name`; `is_summed`: the split gives partial sums."""
        for position, dim in enumerate(self.dims or ()):
            if name in dim.names:
                return Shard(position)
        return Partial() if is_summed and self.is_term else Replicate()


@dataclass(frozen=True)
class Annotation:
    """A parsed annotation, for operands with a known number of dimensions.

    `summed` holds the names that are summed over, `fixed` those that must not be split.
    """

    inputs: tuple[TensorPattern, ...]
    outputs: tuple[TensorPattern, ...]
    summed: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()

    def __str__(self) -> str:
        sides = (", ".join(self._text(pattern) for pattern in side) for side in (self.inputs, self.outputs))
        return " -> ".join(sides)

    def _text(self, pattern: TensorPattern) -> str:
        if pattern.dims is None:
            return "?"
        words = [self._dim_text(dim) for dim in pattern.dims] + [SUMMED] * pattern.is_term
        return " ".join(words)

    def _dim_text(self, dim: Dim) -> str:
        mark = "+" if set(dim.names) & self.summed else "^" if set(dim.names) & self.fixed else ""
        return f"({' '.join(dim.names)}){mark}" if len(dim.names) > 1 else "".join(dim.names) + mark or "1"

    @cached_property
    def candidates(self) -> tuple[str, ...]:
        """Names along which the op can be split, in the order of their first appearance; sizes are not considered."""
        names = dict.fromkeys(name for pattern in (*self.inputs, *self.outputs) for name in _leading(pattern))
        found = tuple(name for name in names if name not in self.fixed and self._is_leading(name))
        return (*found, SUMMED) if any(pattern.is_term for pattern in self.outputs) else found

    def _is_leading(self, name: str) -> bool:
        dims = (dim for pattern in (*self.inputs, *self.outputs) for dim in pattern.dims or ())
        return all(dim.names[0] == name for dim in dims if name in dim.names)

    def is_partial(self, name: str) -> bool:
        """Whether a split along `name` gives partial sums."""
        return name == SUMMED or name in self.summed

    def input_placements(self, name: str | None) -> tuple[Placement, ...]:
        """The placement of each operand for a split along `name` (None: no split)."""
        if name is None:
            return (Replicate(),) * len(self.inputs)
        return tuple(pattern.placement(name, self.is_partial(name)) for pattern in self.inputs)

    def output_placements(self, name: str | None) -> tuple[Placement, ...]:
        """The placement of each result of a split along `name` (None: no split)."""
        if name is None:
            return (Replicate(),) * len(self.outputs)
        if self.is_partial(name):
            return (Partial(),) * len(self.outputs)
        return tuple(pattern.placement(name, False) for pattern in self.outputs)

    def gradient_placements(self, name: str | None) -> tuple[Placement, ...]:
        """The placements of the operands' gradients after the backward pass of an op that is split along `name`.

        The gradient of an operand that every rank holds whole is a partial sum: each rank computes it from its part of
        the results. A term of a sum has the gradient of the sum, which every rank holds.
        """
        wanted = self.input_placements(name)
        if name is None:
            return wanted
        return tuple(Replicate() if p.is_partial() else Partial() if p.is_replicate() else p for p in wanted)

    def sizes(self, shapes: Sequence[Sequence[int] | None], keywords: Mapping[str, int]) -> dict[str, int]:
        """The size of each name, from operand shapes (None: no tensor) and keywords; ValueError on conflicts."""
        known = {name: size for name, size in keywords.items() if name in self._names}
        for pattern, shape in zip(self.inputs, shapes, strict=True):
            if pattern.dims is None or shape is None:
                continue
            if len(pattern.dims) != len(shape):
                raise ValueError(f"{self} wants {len(pattern.dims)} dimensions where an operand has shape {[*shape]}")
            for dim, size in zip(pattern.dims, shape, strict=True):
                self._fill_in(known, dim, size)
        return known

    @cached_property
    def _names(self) -> frozenset[str]:
        patterns = (*self.inputs, *self.outputs)
        return frozenset(name for pattern in patterns for dim in pattern.dims or () for name in dim.names)

    def _fill_in(self, known: dict[str, int], dim: Dim, size: int) -> None:
        """Adds the one name of `dim` with an unknown size to `known`; ValueError if sizes disagree."""
        unknown = [name for name in dim.names if name not in known]
        product = math.prod(known[name] for name in dim.names if name in known)
        if len(unknown) > 1:
            raise ValueError(f"{self}: the sizes of {unknown} are not given; pass all but one as keywords")
        if unknown and product and size % product == 0:
            known[unknown[0]] = size // product
        elif unknown or size != product:
            raise ValueError(f"{self}: {' '.join(dim.names) or 1} has size {product} but a dimension has {size}")


def _leading(pattern: TensorPattern) -> Iterator[str]:
    yield from (dim.names[0] for dim in pattern.dims or () if dim.names)


def parse(text: str, num_dims: Sequence[int | None]) -> Annotation:
    """Parses the annotation `text` for operands of `num_dims` dimensions each (None: no tensor, taken as `?`).

    The ValueError names the problem: a token, the number of operands, a name that a result lacks, or a name with two
    marks.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(f"annotation {text!r} must have one '->' between operands and results")
    inputs, outputs = ([(part.split() and part) or " " for part in side.split(",")] for side in sides)
    if not sides[0].strip() and not num_dims:
        inputs = []
    if len(inputs) != len(num_dims):
        raise ValueError(f"annotation {text!r} has {len(inputs)} operands, the op has {len(num_dims)}")
    marks: dict[str, set[str]] = {}
    num_leading: list[int] = []
    in_patterns = [_pattern(part, size, marks, num_leading, text) for part, size in zip(inputs, num_dims, strict=True)]
    out_patterns = [_pattern(part, None, marks, num_leading, text) for part in outputs]
    if any(len(found) > 1 for found in marks.values()):
        both = next(name for name, found in marks.items() if len(found) > 1)
        raise ValueError(f"annotation {text!r} marks {both!r} with + and ^; keep one of them")
    summed, fixed = (frozenset(name for name, found in marks.items() if mark in found) for mark in "+^")
    annotation = Annotation(tuple(in_patterns), tuple(out_patterns), summed, fixed)
    check_results(annotation, text)
    return annotation


def check_results(annotation: Annotation, text: str) -> None:
    """Raises ValueError unless every name that may be split is in all results, or is summed over and in none."""
    for name in sorted(annotation._names - annotation.fixed):
        present = [any(name in dim.names for dim in pattern.dims or ()) for pattern in annotation.outputs]
        if name in annotation.summed and any(present):
            raise ValueError(f"annotation {text!r}: {name}+ is summed over, so that no result can have it; drop the +")
        if name not in annotation.summed and not all(present):
            raise ValueError(f"annotation {text!r}: {name!r} is missing in a result; write {name}+ or {name}^")


def _pattern(
    part: str, num_dims: int | None, marks: dict[str, set[str]], num_leading: list[int], text: str
) -> TensorPattern:
    """The pattern of one operand (with `num_dims` dimensions) or result. Records marks and the length of `*`."""
    tokens = list(TOKEN.finditer(part))
    if any(match[9] for match in tokens) and len(tokens) == 1:
        return TensorPattern(None)
    dims: list[Dim] = []
    for match in tokens:
        group, group_mark, star, star_mark, name, mark, one, plus, _, wrong = match.groups()
        if wrong or match[9] or (group is not None and not group.split()):
            raise ValueError(f"annotation {text!r}: {match[0]!r} is no token; see hybrid_engine.register_op")
        if plus:
            continue
        names = group.split() if group is not None else [] if one else [name]
        if star:
            count = _leading_dims(num_dims, len(tokens) - 1 - sum(bool(m[8]) for m in tokens), num_leading, text)
            names = [f"*{position}" for position in range(count)]
            dims += [Dim((leading,)) for leading in names]
        else:
            dims.append(Dim(tuple(names)))
        for found in names:
            marks.setdefault(found, set()).update(group_mark or star_mark or mark or ())
    return TensorPattern(tuple(dims), any(match[8] for match in tokens))


def _leading_dims(num_dims: int | None, others: int, num_leading: list[int], text: str) -> int:
    """Number of dimensions of `*`: those of the operand beyond its `others`, or as many as in earlier operands."""
    if num_dims is None:
        if not num_leading:
            raise ValueError(f"annotation {text!r} has a * in its results alone")
        return num_leading[0]
    count = num_dims - others
    if count < 0 or (num_leading and num_leading[0] != count):
        raise ValueError(f"annotation {text!r} does not fit an operand of {num_dims} dimensions")
    num_leading[:] = [count]
    return count


@dataclass(frozen=True, kw_only=True)
class OpPart:
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
class OpCall:
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


def call_of(node: fx.Node) -> OpCall:
    """The call that a node of the graph makes."""
    assert isinstance(node.target, torch._ops.OpOverload), f"{node.target=}"
    arguments = arguments_of(node.target, node.args, dict(node.kwargs))
    values = fx.node.map_arg(arguments, lambda entry: entry.meta["val"])
    outputs = tuple(tensors_in([node.meta["val"]]))
    return OpCall(node.target, dict(values), outputs)
