"""Policies: from a graph and the sizes of a mesh to a plan."""

import random
from collections.abc import Sequence

from torch.distributed.tensor import Placement, Shard

from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op
from hybrid_engine.extensions.parallelize.planning.following import Names, following
from hybrid_engine.extensions.parallelize.planning.plan import Plan


def replicated_plan(graph: Graph, mesh: Sequence[int]) -> Plan:
    """Every rank computes everything."""
    return Plan(graph=graph, mesh=tuple(mesh))


def random_plan(graph: Graph, mesh: Sequence[int], seed: int = 1) -> Plan:
    """Every op is split along a name drawn with `seed`, over each axis of the mesh; replicated where none divides.

    A stress test of the lowering, and no plan to train by: nearly every edge changes a layout.
    """
    draw = random.Random(seed)
    plan = replicated_plan(graph, mesh)
    for op in graph.ops.values():
        names: list[str | None] = [None] * len(mesh)
        for axis in range(len(mesh)):
            possible = [name for name in op.rule.annotation.candidates if _fits(op, names, axis, name, mesh)]
            names[axis] = draw.choice(possible) if possible else None
        if any(names):
            plan.splits[op.key] = tuple(names)
    return plan


def _fits(op: Op, names: Sequence[str | None], axis: int, name: str, mesh: Sequence[int]) -> bool:
    return op.rule.can_split([*names[:axis], name, *names[axis + 1 :]], mesh)


def batch_plan(graph: Graph, mesh: Sequence[int]) -> Plan:
    """Dimension 0 of the arguments is split, and whatever follows from it; the first axis of the mesh is used.

    An op that needs the whole batch (a batch norm) is computed whole by every rank.
    """
    plan = replicated_plan(graph, mesh)
    size = mesh[0]
    placements: dict[str, Placement] = {
        key: Shard(0)
        for key, value in graph.of_kind("input").items()
        if value.shape and value.shape[0] % size == 0 and value.shape[0] > 0
    }
    for op in graph.ops.values():
        name = following(op, placements, mesh)
        if name is not None:
            names: Names = (name, *(None for _ in mesh[1:]))
            plan.splits[op.key] = names
            given = op.rule.annotation.output_placements(name)
            placements |= {key: given[int(key.rsplit("/", 1)[1])] for key in op.outputs}
    return plan
