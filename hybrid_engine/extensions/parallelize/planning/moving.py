"""Layouts of tensors, and which collectives bring one from one to another, as DTensor's redistribution makes them."""

from collections.abc import Iterable, Sequence
from functools import cache
from math import prod
from typing import NamedTuple

from torch.distributed.tensor import Placement, Replicate

Layout = tuple[Placement, ...]
"""A placement for each axis of the mesh."""


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
