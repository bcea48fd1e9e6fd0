"""Which splits of an op a planner considers."""

from collections.abc import Callable, Sequence
from itertools import product

from hybrid_engine.parallel.graph.graph import Graph, Op
from hybrid_engine.parallel.planning.following import Names
from hybrid_engine.parallel.planning.op_costs import split_degree
from hybrid_engine.parallel.planning.plan import Plan
from hybrid_engine.parallel.planning.policies import batch_plan
from hybrid_engine.parallel.planning.setting import Setting


def all_choices(mesh: Sequence[int], setting: Setting) -> Callable[[Op], list[Names]]:
    """Every split of an op over a mesh that divides and cuts it into no more parts than allowed."""

    def choices(op: Op) -> list[Names]:
        names = product(*(((None, *op.rule.annotation.candidates) if size > 1 else (None,)) for size in mesh))
        fitting = [found for found in names if op.rule.can_split(found, mesh)]
        limit = setting.max_partition_degree
        return [found for found in fitting if split_degree(op.rule, found, mesh) <= limit]

    return choices


def batch_choices(graph: Graph, mesh: Sequence[int], setting: Setting) -> Callable[[Op], list[Names]]:
    """The batch is split over the first axis of the mesh wherever it can be, over the others every split is tried."""
    splits_of_batch, anything = batch_plan(graph, mesh), all_choices(mesh, setting)

    def choices(op: Op) -> list[Names]:
        first = splits_of_batch.split_of(op)[0]
        return [names for names in anything(op) if names[0] == first] or [splits_of_batch.split_of(op)]

    return choices


def choices_of(plan: Plan) -> Callable[[Op], list[Names]]:
    """The one split of each op that a plan has."""
    return lambda op: [plan.split_of(op)]
