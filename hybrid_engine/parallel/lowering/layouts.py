"""Which layout each tensor of a planned graph has, and which one each op that reads it wants."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Placement, Replicate

from hybrid_engine.parallel.graph.graph import Graph, Op
from hybrid_engine.parallel.planning.plan import Plan

Layout = tuple[Placement, ...]
"""A placement for each axis of the mesh."""


@dataclass(frozen=True)
class Edge:
    """One operand of one op: the tensor, the layout that the op wants, and that of the gradient it gives back."""

    key: str
    wanted: Layout
    gradient: Layout


def gradient_layout(layout: Layout) -> Layout:
    """The layout of the gradient of a tensor with `layout`: of a partial sum every rank has the sum's gradient."""
    return tuple(Replicate() if placement.is_partial() else placement for placement in layout)


def whole(plan: Plan) -> Layout:
    """The layout of a tensor that every rank has."""
    return (Replicate(),) * len(plan.mesh)


def edges_of(plan: Plan, op: Op) -> tuple[Edge, ...]:
    """What `op` wants of its operands."""
    names = plan.split_of(op)
    wanted, gradients = op.rule.input_placements(names), op.rule.gradient_placements(names)
    return tuple(Edge(*entry) for entry in zip(op.inputs, wanted, gradients, strict=True))


def parameter_layouts(graph: Graph, plan: Plan) -> dict[str, Layout]:
    """How each parameter is kept: as that op wants it, of those that read it, that has it split over most axes."""
    consumers = graph.consumers()
    return {key: _kept(plan, consumers[key]) for key in graph.of_kind("parameter")}


def _kept(plan: Plan, consumers: Sequence[tuple[Op, int]]) -> Layout:
    wanted = [gradient_layout(op.rule.input_placements(plan.split_of(op))[position]) for op, position in consumers]
    return max(wanted, key=lambda layout: sum(p.is_shard() for p in layout), default=whole(plan))


def value_layouts(graph: Graph, plan: Plan) -> dict[str, Layout]:
    """The layout of every tensor of the graph as its maker gives it."""
    layouts = {key: whole(plan) for key in graph.values} | parameter_layouts(graph, plan)
    for op in graph.ops.values():
        given = op.rule.output_placements(plan.split_of(op))
        layouts |= {key: given[int(key.rsplit("/", 1)[1])] for key in op.outputs}
    return layouts
