"""Classes of ops that are split alike and of tensors that are made and read alike; the planner decides per class.

Ops of repeated modules (`layers.0`, `layers.1`, ...) that do the same form one class.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybrid_engine.extensions.parallelize.graph.code import END, FIXED, FREE, RESHAPED
from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op, Value
from hybrid_engine.extensions.parallelize.planning.following import Names
from hybrid_engine.extensions.parallelize.planning.moving import Layout, gradient_layout
from hybrid_engine.extensions.parallelize.planning.setting import Cost

State = tuple[Layout, Layout]
"""The layout in which an op needs an operand, and the layout of the gradient that it returns for it."""


class Reader(NamedTuple):
    """One operand of a class of ops; `op_class` None: the tensor is a result of the graph, whole on every rank."""

    op_class: int | None
    position: int
    keeps: bool
    """Whether the tensor is kept for the backward pass in this layout."""
    again: bool
    """Whether the reader is in a recomputed module."""
    way: str = FREE
    """How the tensor reaches the reader; one of `WAYS` in `hybrid_engine.extensions.parallelize.graph.code`."""


@dataclass(kw_only=True)
class OpClass:
    """Ops that are split alike."""

    ops: list[Op]
    choices: list[Names] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    """Cost of all ops of the class, for each choice."""
    largest: list[float] = field(default_factory=list)
    """Bytes of the largest tensor that one of the ops reads or makes, for each choice."""
    states: list[tuple[State, ...]] = field(default_factory=list)
    """States of the operands, for each choice."""
    outputs: list[tuple[Layout, ...]] = field(default_factory=list)
    """Layouts of the results, for each choice."""

    @property
    def keys(self) -> list[str]:
        """The keys of the ops."""
        return [op.key for op in self.ops]


@dataclass(frozen=True, kw_only=True)
class TensorClass:
    """Tensors that are made and read alike."""

    value: Value
    maker: tuple[int, int] | None
    """The class of ops that makes the tensor, and the index of the result; None for an input of the graph."""
    readers: tuple[Reader, ...]
    has_gradient: bool
    is_view: bool
    """Whether the tensor shares the memory of another tensor."""
    kept_by_maker: bool
    made_again: bool
    """Whether a recomputed module makes the tensor."""
    enters: bool
    """Whether a recomputed module reads the tensor and another module makes it."""
    count: int

    def may_go(self, reader: Reader, source: Layout, state: State) -> bool:
        """Whether `reader` may read the tensor in `state` if it is made in layout `source`."""
        wanted, gradient = state
        if reader.way in (FIXED, RESHAPED, END) and wanted != source:
            return False
        gives_alike = not self.has_gradient or gradient == gradient_layout(wanted)
        is_whole = all(placement.is_replicate() for placement in source)
        return gives_alike or reader.way == FREE or (reader.way == RESHAPED and is_whole)


def pattern(path: str) -> str:
    """A module's path with `*` for numbers: `layers.*.mlp` for `layers.3.mlp`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


def kind_of(op: Op, graph: Graph, reused: set[str]) -> object:
    """A key that is equal for ops of one class."""
    ordinal = "" if reused & set(op.inputs) else op.key.rsplit(":", 1)[1]
    shapes = tuple((graph.values[key].shape, graph.values[key].dtype) for key in (*op.inputs, *op.outputs))
    return pattern(op.path), op.name, ordinal, str(op.rule.annotation), tuple(op.rule.sizes.items()), shapes


def reused_parameters(graph: Graph, ops: Sequence[Op]) -> set[str]:
    """Parameters that more than two operands read; the ops that do the same with one of them are split alike."""
    counts = Counter(key for op in ops for key in op.inputs if graph.values[key].kind == "parameter")
    return {key for key, count in counts.items() if count > 2}
