"""Layouts of tensors, and which collectives bring one from one to another, as DTensor's redistribution makes them."""

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
"""By the name of a parameter, what ranks read of it; None: all of it."""


class Move(NamedTuple):
    """One collective, or the work of one rank by itself: `copy`."""

    kind: str
    axis: int
    num_elements: float
    """Before an all-reduce or reduce-scatter, after an all-gather, else of the part that a rank has."""


def gradient_layout(layout: Layout) -> Layout:
    """The layout of the gradient of a tensor with `layout`: of a partial sum every rank has the sum's gradient."""
    return tuple(Replicate() if placement.is_partial() else placement for placement in layout)


def kept_layout(wanted: Iterable[Layout], whole: Layout) -> Layout:
    """How a parameter is kept that ops read in these layouts: in that, the first one, which cuts it over most axes."""
    layouts = [gradient_layout(layout) for layout in wanted]
    return max(layouts, key=lambda layout: sum(p.is_shard() for p in layout), default=whole)


def local_elements(shape: Sequence[int], layout: Layout, mesh: Sequence[int]) -> float:
    """The elements of one rank's part."""
    parts = prod(size for placement, size in zip(layout, mesh, strict=True) if placement.is_shard())
    return prod(shape) / parts


@cache
def moves(num_elements: int, source: Layout, target: Layout, mesh: tuple[int, ...]) -> tuple[Move, ...]:
    """What happens to a tensor of `num_elements` that lies in `source` and is wanted in `target`."""
    found: list[Move] = []
    current = list(source)
    for axis in reversed(range(len(mesh))):
        placement = current[axis]
        # A dimension that several axes cut is put together from the innermost axis on before its cutting changes.
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
    """The axes that cut the dimension that `placement` cuts, where they are several or others than before."""
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
    """The copies that processes need which generate together from the parts that they train.

    They are a mesh of these sizes; `order` are its axes, that one first which is the outermost for tensor parallelism.
    """

    def __init__(self, graph: Graph, sizes: Sequence[int], order: Sequence[int]):
        self._sizes, self._reads = tuple(sizes), reads_of(graph.original, prod(sizes))
        places = places_of_ranks(sizes, order)
        coordinates = list(torch.cartesian_prod(*(torch.arange(size) for size in sizes)).view(-1, len(sizes)).tolist())
        self._coordinates = [coordinates[place] for place in places]

    def num_elements(self, name: str, shape: Sequence[int], layout: Layout) -> int:
        """The elements of a parameter, kept in `layout`, of which a process makes a copy."""
        return sum(self._copied(shape, layout, cut) for cut in self._reads.get(name, ()))

    def _copied(self, shape: Sequence[int], layout: Layout, cut: Cut | None) -> int:
        """Nothing where each rank reads one range of what its process holds, which is a view."""
        held = [bounds_of(shape, layout, self._sizes, coordinate) for coordinate in self._coordinates]
        inside = [inside_of(bounds, cut, rank, shape) for rank, bounds in enumerate(held)]
        if all(part is not None and all(len(ranges) == 1 for ranges in part.ranges) for part in inside):
            return 0
        return max(prod(part_shape(shape, cut, rank)) for rank in range(len(held)))


def reads_of(module: nn.Module, num_parts: int) -> Reads:
    """What `num_parts` processes read of the parameters of `module` to generate; of a model without containers nothing.

    Adapters, which are fused into weights, are not among them.
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
