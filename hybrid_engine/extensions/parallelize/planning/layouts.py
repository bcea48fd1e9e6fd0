"""Which layout each tensor of a planned graph has, and which one each op that reads it wants."""

from dataclasses import dataclass
from math import prod

from torch.distributed.tensor import Replicate

from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op
from hybrid_engine.extensions.parallelize.planning.moving import Layout, kept_layout
from hybrid_engine.extensions.parallelize.planning.plan import Plan


@dataclass(frozen=True)
class Edge:
    """One operand of one op: the tensor, the layout that the op wants, and that of the gradient it gives back."""

    key: str
    wanted: Layout
    gradient: Layout


def whole(plan: Plan) -> Layout:
    """The layout of a tensor that every rank has."""
    return (Replicate(),) * len(plan.mesh)


def edges_of(plan: Plan, op: Op) -> tuple[Edge, ...]:
    """What `op` wants of its operands."""
    names = plan.split_of(op)
    wanted, gradients = op.rule.input_placements(names), op.rule.gradient_placements(names)
    return tuple(Edge(*entry) for entry in zip(op.inputs, wanted, gradients, strict=True))


def parameter_layouts(graph: Graph, plan: Plan) -> dict[str, Layout]:
    """How each parameter is kept, from how the ops want it that read it."""
    wanted: dict[str, list[Layout]] = {key: [] for key in graph.of_kind("parameter")}
    for op in graph.ops.values():
        for edge in edges_of(plan, op):
            if edge.key in wanted:
                wanted[edge.key].append(edge.wanted)
    return {key: kept_layout(layouts, whole(plan)) for key, layouts in wanted.items()}


def split_order(graph: Graph, plan: Plan) -> tuple[int, ...]:
    """The plan's axes, that one first over which most of the parameters is split.

    Of a dimension that several axes cut, the first of them counts.
    """
    values, elements = graph.of_kind("parameter"), [0] * len(plan.mesh)
    for name, layout in parameter_layouts(graph, plan).items():
        for axis in range(len(elements)):
            if layout[axis].is_shard() and layout[axis] not in layout[:axis]:
                elements[axis] += prod(values[name].shape)
    return tuple(sorted(range(len(elements)), key=lambda axis: -elements[axis]))


def value_layouts(graph: Graph, plan: Plan) -> dict[str, Layout]:
    """The layout of every tensor of the graph as its maker gives it."""
    layouts = {key: whole(plan) for key in graph.values} | parameter_layouts(graph, plan)
    for op in graph.ops.values():
        given = op.rule.output_placements(plan.split_of(op))
        layouts |= {key: given[int(key.rsplit("/", 1)[1])] for key in op.outputs}
    return layouts
