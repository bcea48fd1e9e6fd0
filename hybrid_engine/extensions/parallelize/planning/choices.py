"""Which splits of an op a planner considers."""

from collections.abc import Callable, Sequence
from itertools import product

from torch.distributed.tensor import Placement

from hybrid_engine.extensions.parallelize.graph.annotations import SUMMED
from hybrid_engine.extensions.parallelize.graph.code import RESHAPES
from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op
from hybrid_engine.extensions.parallelize.planning.following import Names, following
from hybrid_engine.extensions.parallelize.planning.op_costs import split_degree
from hybrid_engine.extensions.parallelize.planning.plan import Plan
from hybrid_engine.extensions.parallelize.planning.policies import batch_plan
from hybrid_engine.extensions.parallelize.planning.setting import Setting


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


def eager_choices(graph: Graph, size: int) -> Callable[[Op], list[Names]]:
    """What hooks on modules carry, over one axis: columns of products with parameters, what follows from them, rows.

    Code of modules goes on with parts of features and heads; parts of samples and positions it would take for all.
    """
    plan = Plan(graph=graph, mesh=(size,))
    products = [op for op in graph.ops.values() if _is_product(op, graph)]
    plan.splits = {op.key: ("n",) for op in products if op.rule.can_split(["n"], (size,))}
    plan.follow()
    found = {key: [names] for key, names in plan.splits.items() if graph.ops[key].rule.on_part_of(names) is None}
    layouts = {key: where for op in graph.ops.values() for key, where in _made(plan, op).items()}
    rows: dict[str, str] = {}
    for op in products:
        if (name := following(op, layouts, (size,))) is not None:
            found.setdefault(op.key, []).append((name,))
            rows |= dict.fromkeys(op.outputs, op.path)
    for op in graph.ops.values():
        if op.name in RESHAPES and rows.get(op.inputs[0]) == op.path and op.rule.can_split([SUMMED], (size,)):
            found.setdefault(op.key, []).append((SUMMED,))  # added up where it leaves the module
    return lambda op: [(None,), *found.get(op.key, [])]


def _is_product(op: Op, graph: Graph) -> bool:
    """Whether an op multiplies with a parameter whose columns give features."""
    return op.name in ("linear", "addmm") and any(graph.values[key].kind == "parameter" for key in op.inputs)


def _made(plan: Plan, op: Op) -> dict[str, Placement]:
    given = op.rule.output_placements(plan.split_of(op))
    made = {key: given[int(key.rsplit("/", 1)[1])][0] for key in op.outputs}
    return {key: placement for key, placement in made.items() if placement.is_shard()}


def choices_of(plan: Plan) -> Callable[[Op], list[Names]]:
    """The one split of each op that a plan has."""
    return lambda op: [plan.split_of(op)]
