"""The layouts of tensors under a plan, and the grouping of a graph's ops into blocks and stages.

The planner computes costs from them, and the lowering places parameters and results by them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from torch.distributed.tensor import Replicate

from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op
from hybrid_engine.extensions.parallelize.planning.moving import Layout, kept_layout
from hybrid_engine.extensions.parallelize.planning.plan import Plan


@dataclass(frozen=True)
class Edge:
    """One operand of one op: the tensor, the layout that the op needs, and that of the gradient it returns."""

    key: str
    wanted: Layout
    gradient: Layout


def whole(plan: Plan) -> Layout:
    """The layout of a tensor that every rank holds whole."""
    return (Replicate(),) * len(plan.mesh)


def edges_of(plan: Plan, op: Op) -> tuple[Edge, ...]:
    """The operands of `op`, with their layouts under the plan."""
    names = plan.split_of(op)
    wanted, gradients = op.rule.input_placements(names), op.rule.gradient_placements(names)
    return tuple(Edge(*entry) for entry in zip(op.inputs, wanted, gradients, strict=True))


def parameter_layouts(graph: Graph, plan: Plan) -> dict[str, Layout]:
    """The layout in which each parameter is kept, from the layouts that its ops need."""
    wanted: dict[str, list[Layout]] = {key: [] for key in graph.of_kind("parameter")}
    for op in graph.ops.values():
        for edge in edges_of(plan, op):
            if edge.key in wanted:
                wanted[edge.key].append(edge.wanted)
    return {key: kept_layout(layouts, whole(plan)) for key, layouts in wanted.items()}


def split_order(graph: Graph, plan: Plan) -> tuple[int, ...]:
    """The plan's axes, sorted by the number of parameter elements that are split over them, largest first.

    If several axes cut the same dimension, only the first of them counts.
    """
    values, elements = graph.of_kind("parameter"), [0] * len(plan.mesh)
    for name, layout in parameter_layouts(graph, plan).items():
        for axis in range(len(elements)):
            if layout[axis].is_shard() and layout[axis] not in layout[:axis]:
                elements[axis] += prod(values[name].shape)
    return tuple(sorted(range(len(elements)), key=lambda axis: -elements[axis]))


def value_layouts(graph: Graph, plan: Plan) -> dict[str, Layout]:
    """The layout in which each tensor of the graph is made."""
    layouts = {key: whole(plan) for key in graph.values} | parameter_layouts(graph, plan)
    for op in graph.ops.values():
        given = op.rule.output_placements(plan.split_of(op))
        layouts |= {key: given[int(key.rsplit("/", 1)[1])] for key in op.outputs}
    return layouts


def blocks_of(graph: Graph) -> dict[str, str]:
    """Maps the key of an op to the path of its block.

    A block is a layer of a list (`layers.3`), or the outermost module that contains no layer. Ops of a module around
    layers belong to the block that runs before them; the first ones belong to the block that runs next.
    """
    found = {key: _layer(op.path) for key, op in graph.ops.items()}
    around = {ancestor for path in found.values() if path for ancestor in _ancestors(path)}
    blocks: dict[str, str] = {}
    last = next((_block(op.path, found[key], around) for key, op in graph.ops.items() if op.path not in around), "")
    for key, op in graph.ops.items():
        last = last if op.path in around or not op.path else _block(op.path, found[key], around)
        blocks[key] = last
    return blocks


def _layer(path: str) -> str | None:
    """The path of the outermost list layer that contains `path`; None if there is none."""
    parts = path.split(".")
    for number, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: number + 1])
    return None


def _ancestors(path: str) -> list[str]:
    parts = path.split(".")
    return ["", *(".".join(parts[:number]) for number in range(1, len(parts)))]


def _block(path: str, layer: str | None, around: set[str]) -> str:
    if layer is not None:
        return layer
    return next((prefix for prefix in [*_ancestors(path)[1:], path] if prefix not in around), path)


def layers_of(graph: Graph) -> list[str]:
    """The blocks that are layers of lists, in execution order."""
    return [block for block in dict.fromkeys(blocks_of(graph).values()) if block == _layer(block)]


def segments_of(graph: Graph) -> list[tuple[tuple[str, ...], list[Op]]]:
    """The graph cut wherever a stage may begin: block names and ops. A cut never divides a block's ops."""
    blocks = blocks_of(graph)
    ops = list(graph.ops.values())
    last = {blocks[op.key]: position for position, op in enumerate(ops)}
    segments: list[tuple[list[str], list[Op]]] = []
    open_until = -1
    for position, op in enumerate(ops):
        if position > open_until:
            segments.append(([], []))
        block = blocks[op.key]
        open_until = max(open_until, last[block])
        segments[-1][1].append(op)
        if block not in segments[-1][0]:
            segments[-1][0].append(block)
    return [(tuple(names), found) for names, found in segments]


def stage_ops(plan: Plan) -> list[list[Op]]:
    """The ops of each stage. An op that no stage's module contains runs where the op before it runs."""
    if not plan.stages:
        return [list(plan.graph.ops.values())]
    number_of = {path: number for number, stage in enumerate(plan.stages) for path in stage}
    found: list[list[Op]] = [[] for _ in plan.stages]
    number = 0
    for op in plan.graph.ops.values():
        number = next((number_of[p] for p in [op.path, *_ancestors(op.path)[::-1]] if p in number_of), number)
        found[number].append(op)
    return found


def recomputed_ops(graph: Graph, patterns: Sequence[str]) -> dict[str, str]:
    """Maps an op's key to the outermost module around it that matches a glob; ValueError for an unused glob."""
    found: dict[str, str] = {}
    unused = set(patterns)
    for key, op in graph.ops.items():
        for path in [*_ancestors(op.path)[1:], op.path]:
            matching = [one for one in patterns if path and fnmatchcase(path, one)]
            unused -= set(matching)
            if matching:
                found[key] = path
                break
    if unused:
        raise ValueError(
            f"recompute_modules={sorted(unused)}: no module of the graph matches; see the paths of graph.ops"
        )
    return found
