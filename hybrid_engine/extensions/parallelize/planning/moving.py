"""Layouts of tensors, the collectives that change them as DTensor's redistribution does, and copies for generation.

Planner and lowering share these layouts; `Setting` and `Space` compute costs from the moves and copies.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate

from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.containers.tensor_parallel import Cut, TensorParallel
from hybrid_engine.extensions.parallelize.graph.graph import Graph
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


def local_elements(shape: Sequence[int], layout: Layout, mesh: Sequence[int]) -> float:
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
            found.append(Move("copy", axis, _elements(num_elements, current, mesh)))
            current[axis] = wanted
        else:
            _change(found, num_elements, current, axis, wanted, mesh)
    return tuple(found)


def _cutting(layout: Layout, placement: Placement) -> list[int]:
    """The axes that cut the dimension of `placement`; empty for a mesh of one axis, where the order does not matter."""
    return [axis for axis, other in enumerate(layout) if other == placement] if len(layout) > 1 else []


def _elements(num_elements: int, layout: Sequence[Placement], mesh: Sequence[int]) -> float:
    return num_elements / prod(size for p, size in zip(layout, mesh, strict=True) if p.is_shard())


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
    local = _elements(num_elements, current, mesh)
    current[axis] = wanted
    if before.is_shard() and wanted.is_replicate():
        found.append(Move("all_gather", axis, local * mesh[axis]))
    elif before.is_shard():
        found.append(Move("all_to_all", axis, local))
    elif before.is_partial():
        found.append(Move("all_reduce" if wanted.is_replicate() else "reduce_scatter", axis, local))
    else:
        found.append(Move("copy", axis, local / mesh[axis]))


class Copies:
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
        cuts = found.setdefault(names[id(parameter)], [])
        cuts += [] if cut in cuts else [cut]
        return parameter.new_empty(part_shape(parameter.shape, cut, rank), device="meta")

    try:
        InferenceModel(module, TensorParallel(size=num_parts, read=read)).bind()
    except (UnsupportedModelError, ValueError):
        return {}
    return found
