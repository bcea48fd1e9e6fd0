"""`autodist`: the policy that makes the fastest plan that fits into memory, for the costs of a machine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod

from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op
from hybrid_engine.extensions.parallelize.options.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.planning.choices import (
    Constraint,
    all_choices,
    batch_choices,
    constrained,
    eager_choices,
    read_constraints,
)
from hybrid_engine.extensions.parallelize.planning.following import Names
from hybrid_engine.extensions.parallelize.planning.layouts import layers_of, recomputed_ops, segments_of
from hybrid_engine.extensions.parallelize.planning.machine import measure_device
from hybrid_engine.extensions.parallelize.planning.op_costs import generation_bytes
from hybrid_engine.extensions.parallelize.planning.options import Options
from hybrid_engine.extensions.parallelize.planning.plan import Plan
from hybrid_engine.extensions.parallelize.planning.plan_costs import (
    PlanCosts,
    best_stages,
    in_flight,
    plan_costs,
    transfer_seconds,
)
from hybrid_engine.extensions.parallelize.planning.programme import Infeasible, frugal, solve
from hybrid_engine.extensions.parallelize.planning.setting import ZERO, Cost, Setting, peaks
from hybrid_engine.extensions.parallelize.planning.space import Space


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The user's requirements on the plan."""

    constraints: Sequence[Constraint] = ()
    recompute: tuple[str, ...] = ()
    """Globs of modules that are always recomputed."""
    num_stages: tuple[int, ...] = (1,)
    pivots: tuple[str, ...] = ()
    """The only blocks that may begin a stage; if empty, any block may."""
    schedule: str = "1f1b"


def autodist(graph: Graph, config: ComputeConfig) -> Plan:
    """The plan of the policy `autodist`, made or loaded; ValueError for wrong options, or if no plan fits."""
    options = Options.of(config.pas_config)
    options.check_folder()
    machine = options.machine()
    if options.re_profile:
        machine = replace(machine, name=f"{machine.name}, device measured", device=measure_device())
    setting = options.setting(config, machine)
    if options.load_plan_path is not None:
        plan = _loaded(options.load_plan_path, graph)
    else:
        plan = best_plan(graph, setting, _wanted(graph, options, config.plan_ngpus))
        plan.notes |= {"task": options.task_name} if options.task_name else {}
    if options.save_plan_path is not None:
        plan.save(options.save_plan_path)
    return plan


def _loaded(path: str, graph: Graph) -> Plan:
    try:
        return Plan.load(path, graph)
    except ValueError as error:
        raise ValueError(f"load_plan_path={path!r}: {error}") from error


def _wanted(graph: Graph, options: Options, plan_ngpus: int) -> Wanted:
    path = options.partition_constraints_path
    stages = [n for n in range(1, plan_ngpus + 1) if plan_ngpus % n == 0] if options.explore_pipeline else [1]
    return Wanted(
        constraints=() if path is None else read_constraints(path, graph),
        recompute=_names(options.recompute_modules),
        num_stages=tuple(stages),
        pivots=_names(options.pipeline_pivots),
        schedule=options.pipeline_scheduler,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def best_plan(graph: Graph, setting: Setting, wanted: Wanted | None = None) -> Plan:
    """The fastest plan that fits. If none fits, the plan that recomputes as few layers as necessary.

    Raises ValueError with the minimum memory that a plan needs if no plan fits even with recomputation.
    """
    planner = _Planner(graph, setting, wanted or Wanted())
    plan = planner.fastest(planner.wanted.recompute)
    layers = layers_of(graph)
    if plan is None and setting.trains and layers and not planner.wanted.recompute and not setting.is_eager:
        plan = planner.fastest(tuple(layers))
        if plan is not None and not plan.stages:
            plan = _fewest(planner, layers, plan)
    if plan is None and min(planner.least) == float("inf"):
        raise ValueError(
            "lowering='eager' carries no plan of what the policy may choose from; allow more, or pass lowering='graph'"
        )
    if plan is None:
        raise ValueError(
            f"mem_constraint={setting.memory_bytes / 1e9:.4g} GB: the most frugal plan on {setting.plan_ngpus} "
            f"processes needs {min(planner.least) / 1e9:.4g} GB; give more, or take more processes or smaller samples"
        )
    plan.notes |= {"policy": "autodist", "costs": setting.machine.name}
    return plan


def _fewest(planner: "_Planner", layers: Sequence[str], plan: Plan) -> Plan:
    """The plan of one stage that recomputes the fewest layers, by bisection; `plan` recomputes all of them."""
    low, high = 0, len(layers)
    while high - low > 1:
        middle = (low + high) // 2
        found = planner.fastest(tuple(layers[:middle]))
        low, high, plan = (low, middle, found) if found is not None else (middle, high, plan)
    return plan


@dataclass
class _Planner:
    graph: Graph
    setting: Setting
    wanted: Wanted
    least: list[float] = field(default_factory=list)
    """Bytes that each plan that did not fit would have needed."""

    def __post_init__(self) -> None:
        self.segments = _joined(segments_of(self.graph), self.wanted.pivots)

    def fastest(self, recompute: tuple[str, ...]) -> Plan | None:
        """The fastest plan that fits and recomputes these modules; None if no plan fits."""
        found: list[PlanCosts] = []
        for num_stages in self.wanted.num_stages:
            for mesh in meshes(self.setting.plan_ngpus // num_stages, self.setting):
                plan = self._staged(mesh, num_stages, recompute) if num_stages > 1 else self._whole(mesh, recompute)
                if plan is not None:
                    found.append(plan_costs(plan, self.setting))
        return min(found, key=lambda one: one.seconds).plan if found else None

    def _space(self, mesh: tuple[int, ...], setting: Setting, recompute: tuple[str, ...]) -> Space:
        choices = constrained(choices_on(self.graph, mesh, setting), self.wanted.constraints, mesh)
        return Space(self.graph, mesh, setting, choices, recomputed=recomputed_ops(self.graph, recompute))

    def _whole(self, mesh: tuple[int, ...], recompute: tuple[str, ...]) -> Plan | None:
        """The best plan of one stage; None if no plan fits."""
        constants = generation_bytes(self.graph, self.setting, list(self.graph.ops.values()), prod(mesh))
        space = self._space(mesh, self.setting, recompute)
        try:
            plan = space.plan(solve(space, constants))
        except Infeasible as error:
            self.least.append(error.least_bytes)
            return None
        plan.recompute = recompute
        return plan

    def _staged(self, mesh: tuple[int, ...], num_stages: int, recompute: tuple[str, ...]) -> Plan | None:
        """The best division into stages for the fastest splits; for those with the least memory if it does not fit."""
        unlimited = replace(self.setting, memory_bytes=float("inf"))
        space = self._space(mesh, unlimited, recompute)
        for find in (solve, frugal):
            assignment = find(space)
            ends = self._division(space, assignment, num_stages)
            if ends is not None:
                plan = space.plan(assignment)
                plan.recompute = recompute
                plan.stages = tuple(
                    tuple(block for names, _ in self.segments[start:end] for block in names)
                    for start, end in zip((0, *ends), ends, strict=False)
                )
                plan.num_micro_batches, plan.schedule = self.setting.num_micro_batches, self.wanted.schedule
                return plan
        return None

    def _division(self, space: Space, assignment: list[int], num_stages: int) -> tuple[int, ...] | None:
        """For each stage, the index after its last segment; None if no division fits."""
        if len(self.segments) < num_stages:
            return None
        by_op = space.by_op(assignment)
        costs = [_sum(by_op, ops) for _, ops in self.segments]
        arriving = [transfer_seconds(self.graph, self.setting, ops, space.gradients) for _, ops in self.segments]
        biggest = {key: one.largest[n] for one, n in zip(space.classes, assignment, strict=True) for key in one.keys}
        largest = [max(biggest[op.key] for op in ops) for _, ops in self.segments]
        setting = self.setting
        generating = [generation_bytes(self.graph, setting, ops, prod(space.mesh)) for _, ops in self.segments]

        @cache
        def seconds(start: int, end: int, stage: int) -> float | None:
            cost = sum(costs[start:end], ZERO)
            flying = in_flight(self.wanted.schedule, num_stages, stage, setting.num_micro_batches)
            constants = sum(generating[start:end])
            peak = max(peaks(cost, max(largest[start:end]), replace(setting, in_flight=flying), constants).values())
            if peak > setting.memory_bytes:
                self.least.append(peak)
                return None
            arrived = arriving[start] if start else 0.0
            return cost.seconds(setting.num_micro_batches) / setting.num_micro_batches + arrived

        return best_stages(len(costs), num_stages, setting.num_micro_batches, seconds)


def _sum(by_op: Mapping[str, Cost], ops: Sequence[Op]) -> Cost:
    return sum((by_op[op.key] for op in ops), ZERO)


def _joined(
    segments: Sequence[tuple[tuple[str, ...], list[Op]]], pivots: Sequence[str]
) -> list[tuple[tuple[str, ...], list[Op]]]:
    """The segments, merged where no stage may begin; ValueError for a pivot before which no stage can begin."""
    if not pivots:
        return list(segments)
    firsts = [names[0] for names, _ in segments]
    if unknown := [pivot for pivot in pivots if pivot not in firsts]:
        raise ValueError(f"pipeline_pivots: no stage can begin at {unknown}; take some of {firsts}")
    joined: list[tuple[tuple[str, ...], list[Op]]] = []
    for names, ops in segments:
        if joined and names[0] not in pivots:
            joined[-1] = ((*joined[-1][0], *names), [*joined[-1][1], *ops])
        else:
            joined.append((names, ops))
    return joined


def meshes(size: int, setting: Setting) -> list[tuple[int, ...]]:
    """One axis for any split, and all pairs of axes whose first axis splits the batch. Eager: one axis only."""
    limit = setting.max_partition_degree
    if setting.is_eager:
        return [(size,)]
    one_axis: list[tuple[int, ...]] = [(size,)] if size <= limit or size == 1 else []
    pairs = [(first, size // first) for first in range(2, size) if size % first == 0]
    return [*one_axis, *pairs] or [(size,)]


def choices_on(graph: Graph, mesh: Sequence[int], setting: Setting) -> Callable[[Op], list[Names]]:
    """The splits that `autodist` tries for each op on a mesh."""
    if setting.is_eager:
        return eager_choices(graph, mesh[0])
    if len(mesh) == 1 or mesh[0] > setting.max_partition_degree:
        return all_choices(mesh, setting)
    return batch_choices(graph, mesh, setting)
