"""`autodist`: the fastest plan that fits into memory, for the costs of a machine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybrid_engine.parallel.compute_config import ComputeConfig
from hybrid_engine.parallel.graph.graph import Graph, Op
from hybrid_engine.parallel.planning.constraints import Constraint, constrained, read_constraints
from hybrid_engine.parallel.planning.options import Options
from hybrid_engine.parallel.planning.plan import Names, Plan
from hybrid_engine.parallel.planning.programme import Infeasible, solve
from hybrid_engine.parallel.planning.setting import Setting
from hybrid_engine.parallel.planning.space import Space, all_choices, batch_choices


def autodist(graph: Graph, config: ComputeConfig) -> Plan:
    """The plan of the policy `autodist`, made or loaded; ValueError for wrong options, or where nothing fits."""
    options = Options.of(config.pas_config)
    if options.load_plan_path is not None:
        plan = Plan.load(options.load_plan_path, graph)
    else:
        constraints = []
        if options.partition_constraints_path is not None:
            constraints = read_constraints(options.partition_constraints_path, graph)
        plan = best_plan(graph, options.setting(config, options.machine()), constraints)
        plan.notes |= {"task": options.task_name} if options.task_name else {}
    if options.save_plan_path is not None:
        plan.save(options.save_plan_path)
    return plan


@dataclass(frozen=True)
class Found:
    """A plan of one stage and the seconds of a step."""

    space: Space
    assignment: list[int]
    seconds: float


def best_plan(graph: Graph, setting: Setting, constraints: Sequence[Constraint] = ()) -> Plan:
    """The fastest plan; ValueError with the least memory that one needs, where none fits."""
    found, least = [], []
    for mesh in meshes(setting):
        try:
            found.append(_solved(graph, mesh, setting, constraints))
        except Infeasible as error:
            least.append(error.least_bytes)
    if not found:
        raise ValueError(
            f"mem_constraint={setting.memory_bytes / 1e9:.4g} GB: the most frugal plan on {setting.plan_ngpus} "
            f"processes needs {min(least) / 1e9:.4g} GB; give more, or take more processes or smaller samples"
        )
    best = min(found, key=lambda one: one.seconds)
    plan = best.space.plan(best.assignment)
    plan.notes |= {"policy": "autodist", "costs": setting.machine.name}
    return plan


def meshes(setting: Setting) -> list[tuple[int, ...]]:
    """One axis for any split, and all pairs of axes of which the first splits the batch."""
    size, limit = setting.plan_ngpus, setting.max_partition_degree
    one_axis: list[tuple[int, ...]] = [(size,)] if size <= limit or size == 1 else []
    pairs = [(first, size // first) for first in range(2, size) if size % first == 0]
    return [*one_axis, *pairs] or [(size,)]


def choices_on(graph: Graph, mesh: Sequence[int], setting: Setting) -> Callable[[Op], list[Names]]:
    """What `autodist` tries on a mesh."""
    if len(mesh) == 1 or mesh[0] > setting.max_partition_degree:
        return all_choices(mesh, setting)
    return batch_choices(graph, mesh, setting)


def _solved(graph: Graph, mesh: tuple[int, ...], setting: Setting, constraints: Sequence[Constraint]) -> Found:
    space = Space(graph, mesh, setting, constrained(choices_on(graph, mesh, setting), constraints, mesh))
    assignment = solve(space)
    cost, _ = space.evaluate(assignment)
    return Found(space, assignment, cost.seconds(setting.num_micro_batches))
