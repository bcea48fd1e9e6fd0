"""Ops that are split alike, and tensors that are made and read alike: one class each, of which the planner decides.

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
"""The layout in which an op wants an operand, and that of the gradient which it gives back."""


class Reader(NamedTuple):
    """One operand of a class of ops; `op_class` None: the tensor leaves the graph, whole on every rank."""

    op_class: int | None
    position: int
    keeps: bool
    """Whether it is kept, from there on, for the backward pass."""
    again: bool
    """Whether that is in a module that is recomputed."""
    way: str = FREE
    """How the tensor gets there (`hybrid_engine.extensions.parallelize.graph.code`)."""


@dataclass(kw_only=True)
class OpClass:
    """Ops that are split alike."""

    ops: list[Op]
    choices: list[Names] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    """Of all its ops, for each choice."""
    largest: list[float] = field(default_factory=list)
    """Bytes of the largest tensor that one of them reads or makes, for each choice."""
    states: list[tuple[State, ...]] = field(default_factory=list)
    """Of the operands, for each choice."""
    outputs: list[tuple[Layout, ...]] = field(default_factory=list)
    """Of the results, for each choice."""

    @property
    def keys(self) -> list[str]:
        """The keys of its ops."""
        return [op.key for op in self.ops]


@dataclass(frozen=True, kw_only=True)
class TensorClass:
    """Tensors that are made and read alike."""

    value: Value
    maker: tuple[int, int] | None
    """The class of ops that makes it and which of its results it is; None for what the graph is given."""
    readers: tuple[Reader, ...]
    has_gradient: bool
    is_view: bool
    """Whether it lies in the memory of another tensor."""
    kept_by_maker: bool
    made_again: bool
    """Whether a recomputed module makes it."""
    enters: bool
    """Whether a recomputed module reads it and another makes it."""
    count: int

    def may_go(self, reader: Reader, source: Layout, state: State) -> bool:
        """Whether it may be read so where it is made in `source`."""
        wanted, gradient = state
        if reader.way in (FIXED, RESHAPED, END) and wanted != source:
            return False
        gives_alike = not self.has_gradient or gradient == gradient_layout(wanted)
        is_whole = all(placement.is_replicate() for placement in source)
        return gives_alike or reader.way == FREE or (reader.way == RESHAPED and is_whole)


def pattern(path: str) -> str:
    """A module's path with `*` for numbers: `layers.*.mlp` of `layers.3.mlp`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


def kind_of(op: Op, graph: Graph, reused: set[str]) -> object:
    """What ops of one class have in common."""
    ordinal = "" if reused & set(op.inputs) else op.key.rsplit(":", 1)[1]
    shapes = tuple((graph.values[key].shape, graph.values[key].dtype) for key in (*op.inputs, *op.outputs))
    return pattern(op.path), op.name, ordinal, str(op.rule.annotation), tuple(op.rule.sizes.items()), shapes


def reused_parameters(graph: Graph, ops: Sequence[Op]) -> set[str]:
    """Parameters that many ops read, which are split alike where they do the same with them."""
    counts = Counter(key for op in ops for key in op.inputs if graph.values[key].kind == "parameter")
    return {key for key, count in counts.items() if count > 2}
