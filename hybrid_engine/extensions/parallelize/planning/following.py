"""Splits that follow from others: an op is split to fit the layout of the tensors that it reads.

`Plan.follow`, the batch policies and the eager choices use this.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from torch.distributed.tensor import Placement

from hybrid_engine.extensions.parallelize.graph.code import RESHAPES
from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op
from hybrid_engine.extensions.parallelize.library.annotations import SUMMED

Names = tuple[str | None, ...]
"""For each axis of the mesh, the annotation's name along which an op is split; None if it is not split."""


class Splits(Protocol):
    """The part of a plan that this module reads."""

    graph: Graph
    mesh: tuple[int, ...]

    def split_of(self, op: Op) -> Names:
        """The names along which `op` is split, by axis."""


def following(
    op: Op, placements: Mapping[str, Placement], mesh: Sequence[int], axis: int = 0, whole: Collection[str] = ()
) -> str | None:
    """The name along which `op` can read its operands over one axis in their current layout; None if there is none.

    `placements` holds the known placements of tensors. Tensors in `whole` must be read whole, unless their placement is
    known; all others may be cut.
    """
    known = {position: placements[key] for position, key in enumerate(op.inputs) if key in placements}
    known = {position: placement for position, placement in known.items() if not placement.is_replicate()}
    uncut = [position for position, key in enumerate(op.inputs) if key in whole and position not in known]
    for name in op.rule.annotation.candidates if known else ():
        wanted = op.rule.annotation.input_placements(name)
        names: list[str | None] = [None] * len(mesh)
        names[axis] = name
        lies_so = all(wanted[position] == placement for position, placement in known.items())
        if lies_so and all(wanted[position].is_replicate() for position in uncut) and op.rule.can_split(names, mesh):
            return name
    return None


def follow(plan: Splits, ops: Collection[Op]) -> dict[str, Names]:
    """New names for each of `ops` that the plan does not split over some axis and that can follow its operands there.

    Partial sums are added up before they are read, except by reshapes in the module that made them.
    """
    found: dict[str, list[str | None]] = {}
    keys = {op.key for op in ops}
    activations = {key for key, value in plan.graph.values.items() if value.kind in ("result", "input")}
    makers = {key: op for op in plan.graph.ops.values() for key in op.outputs}
    for axis in range(len(plan.mesh)):
        placements: dict[str, Placement] = {}
        sums: set[str] = set()
        for op in plan.graph.ops.values():
            name = plan.split_of(op)[axis]
            if name is None and op.key in keys:
                name = following(op, placements, plan.mesh, axis, activations)
                if op.name in RESHAPES and op.inputs[0] in sums and makers[op.inputs[0]].path == op.path:
                    name = SUMMED
                if name is not None:
                    found.setdefault(op.key, list(plan.split_of(op)))[axis] = name
            if name is not None:
                given = op.rule.annotation.output_placements(name)
                made = {key: given[int(key.rsplit("/", 1)[1])] for key in op.outputs}
                placements |= {key: placement for key, placement in made.items() if placement.is_shard()}
                sums |= {key for key, placement in made.items() if placement.is_partial()}
    return {key: tuple(names) for key, names in found.items() if plan.graph.ops[key].rule.can_split(names, plan.mesh)}
