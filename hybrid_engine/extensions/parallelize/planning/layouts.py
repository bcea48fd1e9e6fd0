"""Layouts of tensors under a plan, the collectives that change them, and the blocks and stages of a graph.

Planner and lowering share these layouts. The moves are those of DTensor's redistribution; `GenerationCopies`
are what generation needs in addition.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate

from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.containers.views import Cut, TensorParallel
from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op, layer_of, paths_around
from hybrid_engine.extensions.parallelize.graph.stage_ops import stage_of_path
from hybrid_engine.extensions.parallelize.planning.plan import Plan
from hybrid_engine.zero.slicing import bounds_of, inside_of, part_shape, places_of_ranks

Layout = tuple[Placement, ...]
"""A placement for each axis of the mesh."""
Reads = dict[str, list[Cut | None]]
"""For each parameter name, the parts that ranks read; None stands for the whole parameter."""


class Move(NamedTuple):
    """One collective over an axis, or `copy`, which a rank does locally."""

    kind: str
    axis: int
    num_elements: float
    """Number of elements before an all-reduce or reduce-scatter, after an all-gather, otherwise of the rank's part."""


def gradient_layout(layout: Layout) -> Layout:
    """The layout of the gradient of a tensor with `layout`. For a partial sum every rank has the sum's gradient."""
    return tuple(Replicate() if placement.is_partial() else placement for placement in layout)


def kept_layout(wanted: Iterable[Layout], whole: Layout) -> Layout:
    """The layout in which a parameter is kept: the first of those needed that cuts it over most axes."""
    layouts = [gradient_layout(layout) for layout in wanted]
    return max(layouts, key=lambda layout: sum(p.is_shard() for p in layout), default=whole)


def local_elements(shape: Sequence[int], layout: Sequence[Placement], mesh: Sequence[int]) -> float:
    """Number of elements of one rank's part."""
    parts = prod(size for placement, size in zip(layout, mesh, strict=True) if placement.is_shard())
    return prod(shape) / parts


@cache
def moves(num_elements: int, source: Layout, target: Layout, mesh: tuple[int, ...]) -> tuple[Move, ...]:
    """The moves that bring a tensor of `num_elements` from `source` to `target`."""
    found: list[Move] = []
    current = list(source)
    for axis in reversed(range(len(mesh))):
        placement = current[axis]
        # If the axes that cut a dimension change, it is gathered from the innermost axis on before it is cut again.
        if placement.is_shard() and _cutting(source, placement) != _cutting(target, placement):
            _change(found, num_elements, current, axis, Replicate(), mesh)
    for axis in range(len(mesh)):
        wanted = target[axis]
        if wanted.is_partial() and not current[axis].is_partial():
            _change(found, num_elements, current, axis, Replicate(), mesh)
            found.append(Move("copy", axis, local_elements((num_elements,), current, mesh)))
            current[axis] = wanted
        else:
            _change(found, num_elements, current, axis, wanted, mesh)
    return tuple(found)


def _cutting(layout: Layout, placement: Placement) -> list[int]:
    """The axes that cut the dimension of `placement`; empty for a mesh of one axis, where the order does not matter."""
    return [axis for axis, other in enumerate(layout) if other == placement] if len(layout) > 1 else []


def _change(
    found: list[Move],
    num_elements: int,
    current: list[Placement],
    axis: int,
    wanted: Placement,
    mesh: tuple[int, ...],
) -> None:
    before = current[axis]
    if before == wanted or mesh[axis] == 1:
        current[axis] = wanted
        return
    local = local_elements((num_elements,), current, mesh)
    current[axis] = wanted
    if before.is_shard() and wanted.is_replicate():
        found.append(Move("all_gather", axis, local * mesh[axis]))
    elif before.is_shard():
        found.append(Move("all_to_all", axis, local))
    elif before.is_partial():
        found.append(Move("all_reduce" if wanted.is_replicate() else "reduce_scatter", axis, local))
    else:
        found.append(Move("copy", axis, local / mesh[axis]))


class GenerationCopies:
    """The copies that processes need if they generate together from the parts that they train.

    The processes form a mesh of these sizes. `order` lists its axes; the first is the outermost for tensor parallelism.
    """

    def __init__(self, graph: Graph, sizes: Sequence[int], order: Sequence[int]):
        self._sizes, self._reads = tuple(sizes), reads_of(graph.original, prod(sizes))
        places = places_of_ranks(sizes, order)
        coordinates = list(torch.cartesian_prod(*(torch.arange(size) for size in sizes)).view(-1, len(sizes)).tolist())
        self._coordinates = [coordinates[place] for place in places]

    def num_elements(self, name: str, shape: Sequence[int], layout: Layout) -> int:
        """Number of elements that a process copies of a parameter that is kept in `layout`."""
        return sum(self._copied(shape, layout, cut) for cut in self._reads.get(name, ()))

    def _copied(self, shape: Sequence[int], layout: Layout, cut: Cut | None) -> int:
        """Number of elements copied; 0 if each rank reads one range of its process's part, which is a view."""
        held = [bounds_of(shape, layout, self._sizes, coordinate) for coordinate in self._coordinates]
        inside = [inside_of(bounds, cut, rank, shape) for rank, bounds in enumerate(held)]
        if all(part is not None and all(len(ranges) == 1 for ranges in part.ranges) for part in inside):
            return 0
        return max(prod(part_shape(shape, cut, rank)) for rank in range(len(held)))


def reads_of(module: nn.Module, num_parts: int) -> Reads:
    """The parts of `module`'s parameters that `num_parts` processes read to generate; {} without containers.

    Adapters are not included, because they are fused into weights.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: Reads = {}

    def read(parameter: torch.Tensor, cut: Cut | None, rank: int, name: str) -> torch.Tensor:
        if id(parameter) not in names:  # a buffer, which every process has
            return parameter
        cuts = found.setdefault(names[id(parameter)], [])
        cuts += [] if cut in cuts else [cut]
        return parameter.new_empty(part_shape(parameter.shape, cut, rank), device="meta")

    try:
        InferenceModel(module, TensorParallel(size=num_parts, read=read)).bind()
    except (UnsupportedModelError, ValueError):
        return {}
    return found


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
        layouts |= op.by_result(given)
    return layouts


def blocks_of(graph: Graph) -> dict[str, str]:
    """Maps the key of an op to the path of its block.

    A block is a layer of a list (`layers.3`), or the outermost module that contains no layer. Ops of a module around
    layers belong to the block that runs before them; the first ones belong to the block that runs next.
    """
    found = {key: layer_of(op.path) for key, op in graph.ops.items()}
    around = {ancestor for path in found.values() if path for ancestor in ("", *paths_around(path)[:-1])}
    blocks: dict[str, str] = {}
    last = next((_block(op.path, found[key], around) for key, op in graph.ops.items() if op.path not in around), "")
    for key, op in graph.ops.items():
        last = last if op.path in around or not op.path else _block(op.path, found[key], around)
        blocks[key] = last
    return blocks


def _block(path: str, layer: str | None, around: set[str]) -> str:
    if layer is not None:
        return layer
    return next((prefix for prefix in paths_around(path) if prefix not in around), path)


def layers_of(graph: Graph) -> list[str]:
    """The blocks that are layers of lists, in execution order."""
    return [block for block in dict.fromkeys(blocks_of(graph).values()) if block == layer_of(block)]


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
    found: list[list[Op]] = [[] for _ in plan.stages]
    number = 0
    for op in plan.graph.ops.values():
        own = stage_of_path(op.path, plan.stages)
        number = number if own is None else own
        found[number].append(op)
    return found


def recomputed_ops(graph: Graph, patterns: Sequence[str]) -> dict[str, str]:
    """Maps an op's key to the outermost module around it that matches a glob; ValueError for an unused glob."""
    found: dict[str, str] = {}
    unused = set(patterns)
    for key, op in graph.ops.items():
        for path in paths_around(op.path):
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
