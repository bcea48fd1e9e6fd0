"""`autodist`, the policy that makes the fastest plan that fits into memory, and `explain`, which says why.

Both compute costs of plans by `plan_costs`, which takes a plan of any policy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import NamedTuple

from hybrid_engine.extensions.parallelize.graph.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op
from hybrid_engine.extensions.parallelize.planning.layouts import (
    blocks_of,
    layers_of,
    recomputed_ops,
    segments_of,
    split_order,
    stage_ops,
)
from hybrid_engine.extensions.parallelize.planning.machine import measure_device
from hybrid_engine.extensions.parallelize.planning.op_classes import ATTENTION, generation_bytes, pattern
from hybrid_engine.extensions.parallelize.planning.plan import Names, Plan
from hybrid_engine.extensions.parallelize.planning.policies import (
    Constraint,
    all_choices,
    batch_choices,
    choices_of,
    constrained,
    eager_choices,
    read_constraints,
)
from hybrid_engine.extensions.parallelize.planning.programme import Infeasible, frugal, solve
from hybrid_engine.extensions.parallelize.planning.setting import OPTION_NAMES, ZERO, Cost, Options, PlanSetting, peaks
from hybrid_engine.extensions.parallelize.planning.space import Space

Seconds = Callable[[int, int, int], float | None]
"""Seconds of a micro-batch in a stage, for (start segment, end segment, stage number); None: does not fit."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
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


def _wanted(graph: Graph, options: Options, plan_ngpus: int) -> PlanRequest:
    path = options.partition_constraints_path
    stages = [n for n in range(1, plan_ngpus + 1) if plan_ngpus % n == 0] if options.explore_pipeline else [1]
    return PlanRequest(
        constraints=() if path is None else read_constraints(path, graph),
        recompute=_names(options.recompute_modules),
        num_stages=tuple(stages),
        pivots=_names(options.pipeline_pivots),
        schedule=options.pipeline_scheduler,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def best_plan(graph: Graph, setting: PlanSetting, wanted: PlanRequest | None = None) -> Plan:
    """The fastest plan that fits. If none fits, the plan that recomputes as few layers as necessary.

    Raises ValueError with the minimum memory that a plan needs if no plan fits even with recomputation.
    """
    planner = _Planner(graph, setting, wanted or PlanRequest())
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
    setting: PlanSetting
    wanted: PlanRequest
    least: list[float] = field(default_factory=list)
    """Bytes that each plan that did not fit would have needed."""

    def __post_init__(self) -> None:
        self.segments = _joined(segments_of(self.graph), self.wanted.pivots)

    def fastest(self, recompute: tuple[str, ...]) -> Plan | None:
        found: list[PlanCosts] = []
        for num_stages in self.wanted.num_stages:
            for mesh in meshes(self.setting.plan_ngpus // num_stages, self.setting):
                plan = self._staged(mesh, num_stages, recompute) if num_stages > 1 else self._whole(mesh, recompute)
                if plan is not None:
                    found.append(plan_costs(plan, self.setting))
        return min(found, key=lambda one: one.seconds).plan if found else None

    def _space(self, mesh: tuple[int, ...], setting: PlanSetting, recompute: tuple[str, ...]) -> Space:
        choices = constrained(choices_on(self.graph, mesh, setting), self.wanted.constraints, mesh)
        return Space(self.graph, mesh, setting, choices, recomputed=recomputed_ops(self.graph, recompute))

    def _whole(self, mesh: tuple[int, ...], recompute: tuple[str, ...]) -> Plan | None:
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


def meshes(size: int, setting: PlanSetting) -> list[tuple[int, ...]]:
    """One axis for any split, and all pairs of axes whose first axis splits the batch. Eager: one axis only."""
    limit = setting.max_partition_degree
    if setting.is_eager:
        return [(size,)]
    one_axis: list[tuple[int, ...]] = [(size,)] if size <= limit or size == 1 else []
    pairs = [(first, size // first) for first in range(2, size) if size % first == 0]
    return [*one_axis, *pairs] or [(size,)]


def choices_on(graph: Graph, mesh: Sequence[int], setting: PlanSetting) -> Callable[[Op], list[Names]]:
    """The splits that `autodist` tries for each op on a mesh."""
    if setting.is_eager:
        return eager_choices(graph, mesh[0])
    if len(mesh) == 1 or mesh[0] > setting.max_partition_degree:
        return all_choices(mesh, setting)
    return batch_choices(graph, mesh, setting)


@dataclass(frozen=True)
class StageCosts:
    """The cost of one stage for one of its ranks."""

    cost: Cost
    seconds: float
    """Seconds of a micro-batch, with its share of the work that is done once per step."""
    peaks: Mapping[str, float]
    """Peak bytes, by the moments of a step."""
    by_op: Mapping[str, Cost]


@dataclass(frozen=True)
class PlanCosts:
    """The time and memory of a step under a plan, by stage."""

    plan: Plan
    stages: tuple[StageCosts, ...]
    seconds: float
    """Seconds of an optimizer step."""

    @property
    def peak_bytes(self) -> float:
        """Peak bytes of the rank that needs most memory."""
        return max(max(stage.peaks.values()) for stage in self.stages)


def plan_costs(plan: Plan, setting: PlanSetting) -> PlanCosts:
    """The costs of a plan, computed op by op."""
    recomputed = recomputed_ops(plan.graph, plan.recompute)
    groups = stage_ops(plan)
    micro = setting.num_micro_batches if len(groups) == 1 else plan.num_micro_batches
    setting = replace(setting, num_micro_batches=micro)
    stages = []
    for number, ops in enumerate(groups):
        flying = in_flight(plan.schedule, len(groups), number, micro)
        inside = replace(setting, in_flight=flying)
        own = {op.key: recomputed[op.key] for op in ops if op.key in recomputed}
        order = split_order(plan.graph, plan)
        space = Space(plan.graph, plan.mesh, inside, choices_of(plan), ops=ops, recomputed=own, order=order)
        assignment = [0] * len(space.classes)
        cost, largest = space.evaluate(assignment)
        arriving = transfer_seconds(plan.graph, setting, ops, space.gradients) if number else 0.0
        constants = generation_bytes(plan.graph, setting, ops, prod(plan.mesh))
        stages.append(
            StageCosts(
                cost,
                cost.seconds(micro) / micro + arriving,
                peaks(cost, largest, inside, constants),
                space.by_op(assignment),
            )
        )
    times = [stage.seconds for stage in stages]
    return PlanCosts(plan, tuple(stages), pipeline_seconds([sum(times), max(times)], micro))


def in_flight(schedule: str, num_stages: int, stage: int, num_micro_batches: int) -> int:
    """Number of micro-batches whose activations a stage keeps at once."""
    if num_stages == 1:
        return 1
    return num_micro_batches if schedule == "gpipe" else min(num_stages - stage, num_micro_batches)


def transfer_seconds(graph: Graph, setting: PlanSetting, ops: Sequence[Op], gradients: frozenset[str]) -> float:
    """Seconds to receive the operands of `ops`, a stage, from other stages and to send their gradients back."""
    made = {key for op in ops for key in op.outputs}
    values = {key: graph.values[key] for op in ops for key in op.inputs if key not in made}
    link = setting.machine.near["all_gather"]
    total = 0.0
    for key, value in values.items():
        if value.kind == "result":
            ways = 2 if key in gradients else 1
            size = value.num_bytes / value.dtype.itemsize * setting.weights.itemsize(value.dtype)
            total += ways * (link.latency_s + size / link.bytes_per_s)
    return total


class _Partial(NamedTuple):
    """A division of the first segments into stages."""

    total: float
    longest: float
    ends: tuple[int, ...]


def best_stages(num_segments: int, num_stages: int, num_micro_batches: int, seconds: Seconds) -> tuple[int, ...] | None:
    """For each stage, the index after its last segment; None if no division fits.

    Uses dynamic programming over stages and segments. For each prefix it keeps the divisions that no other beats in
    both the sum and the longest stage, so that it finds the optimum.
    """
    fronts: dict[int, list[_Partial]] = {0: [_Partial(0.0, 0.0, ())]}
    for stage in range(num_stages):
        following: dict[int, list[_Partial]] = {}
        for start, front in fronts.items():
            last = num_segments if stage == num_stages - 1 else start + 1
            for end in range(max(last, start + 1), num_segments - (num_stages - stage - 1) + 1):
                taken = seconds(start, end, stage)
                if taken is not None:
                    extended = [_Partial(p.total + taken, max(p.longest, taken), (*p.ends, end)) for p in front]
                    following.setdefault(end, []).extend(extended)
        fronts = {end: _front(found) for end, found in following.items()}
    complete = fronts.get(num_segments, [])
    best = min(complete, key=lambda p: pipeline_seconds([p.total, p.longest], num_micro_batches), default=None)
    return None if best is None else best.ends


def pipeline_seconds(total_and_longest: Sequence[float], num_micro_batches: int) -> float:
    """Seconds of a step: every stage once, and the longest stage once more for each further micro-batch."""
    total, longest = total_and_longest
    return total + (num_micro_batches - 1) * longest


def _front(found: list[_Partial]) -> list[_Partial]:
    """The divisions that no other beats in both the total and the longest stage."""
    kept: list[_Partial] = []
    for one in sorted(found):
        if not kept or one.longest < kept[-1].longest:
            kept.append(one)
    return kept


def explain(plan: Plan, config: ComputeConfig | None = None) -> str:
    """A text with the costs of a plan, computed from the options of `config` (`costs`, `mem_constraint`, ...).

    Works for plans of any policy and for edited plans. Raises ValueError for wrong options.
    """
    config = config or ComputeConfig(plan_ngpus=plan.plan_ngpus, runtime_ngpus=plan.plan_ngpus)
    options = Options.of({name: value for name, value in config.pas_config.items() if name in OPTION_NAMES})
    setting = options.setting(config, options.machine())
    costs = plan_costs(plan, setting)
    parts = [_summary(costs, setting), _blocks(costs, setting), _runner_up(costs, setting)]
    return "\n\n".join(part for part in parts if part)


def _summary(costs: PlanCosts, setting: PlanSetting) -> str:
    plan = costs.plan
    layout = f"mesh {list(plan.mesh)}" + (f", {len(plan.stages)} stages" if plan.stages else "")
    lines = [
        f"{plan.plan_ngpus} processes a unit ({layout}), {setting.num_units} units; costs: {setting.machine.name}",
        f"a step takes {_ms(costs.seconds)}, the most memory is {_gb(costs.peak_bytes)} of {_gb(setting.memory_bytes)}",
    ]
    for number, stage in enumerate(costs.stages):
        cost, name = stage.cost, f"stage {number}: " if plan.stages else ""
        lines.append(
            f"  {name}a micro-batch computes {_ms(cost.compute_s)} and communicates {_ms(cost.communication_s)}; "
            f"units reduce gradients in {_ms(cost.reduction_s)}"
        )
        moments = ", ".join(f"{moment} {_gb(num_bytes)}" for moment, num_bytes in stage.peaks.items())
        lines.append(f"  {name}memory at its peaks: {moments}")
        if "generation" in stage.peaks:
            others = stage.peaks["generation"] - cost.resident_bytes - cost.copied_bytes
            lines.append(
                f"  {name}generation: {_gb(cost.resident_bytes)} of weights and states + {_gb(cost.copied_bytes)} of "
                f"copies of other parts of weights + {_gb(others)} of keys, values and gathered weights"
            )
    if plan.recompute:
        lines.append(f"  recomputed: {', '.join(plan.recompute)}")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.4g} GB"


def _blocks(costs: PlanCosts, setting: PlanSetting) -> str:
    """A paragraph for each kind of block: blocks of one pattern whose main ops are split alike."""
    plan = costs.plan
    by_op: dict[str, Cost] = {}
    for stage in costs.stages:
        by_op |= stage.by_op
    members: dict[str, list[Op]] = {}
    for key, block in blocks_of(plan.graph).items():
        members.setdefault(block, []).append(plan.graph.ops[key])
    kinds: dict[tuple[str, str], list[str]] = {}
    for block, ops in members.items():
        kinds.setdefault((pattern(block), _splits(plan, ops, block)), []).append(block)
    lines = []
    for (_, splits), blocks in kinds.items():
        total = sum((by_op[op.key] for block in blocks for op in members[block]), ZERO)
        title = blocks[0] if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}, {len(blocks)} alike"
        lines += [f"{title or 'the rest'}: {_costs(total)}", f"  {splits}"]
        if any(plan.split_of(op) != (None,) * len(plan.mesh) for op in members[blocks[0]]):
            lines.append(f"  {_why(costs, setting, [op for block in blocks for op in members[block]])}")
    return "\n".join(lines)


def _costs(cost: Cost) -> str:
    memory = f"{_gb(cost.resident_bytes)} of weights and states, {_gb(cost.kept_bytes)} kept"
    return f"{_ms(cost.compute_s)} computing, {_ms(cost.communication_s)} communicating, {memory}"


def _splits(plan: Plan, ops: Sequence[Op], block: str) -> str:
    words = []
    for op in ops:
        if _is_main(plan.graph, op):
            names = ", ".join(name or "whole" for name in plan.split_of(op))
            path = op.path.removeprefix(block).lstrip(".")
            name = op.name.replace(ATTENTION, "attention")
            words.append(f"{f'{path} ' if path else ''}{name}: {names}")
    return "; ".join(words) or "no weights"


def _is_main(graph: Graph, op: Op) -> bool:
    """Whether an op is attention, or reads a parameter with more than one dimension."""
    values = [graph.values[key] for key in op.inputs]
    return op.name == ATTENTION or any(value.kind == "parameter" and len(value.shape) > 1 for value in values)


def _why(costs: PlanCosts, setting: PlanSetting, ops: Sequence[Op]) -> str:
    """The change in time and memory if every rank computes these ops whole."""
    plan = costs.plan
    kept = {key: names for key, names in plan.splits.items() if key not in {op.key for op in ops}}
    whole = plan_costs(replace(plan, splits=kept), setting)
    seconds, num_bytes = whole.seconds - costs.seconds, whole.peak_bytes - costs.peak_bytes
    fits = "" if whole.peak_bytes <= setting.memory_bytes else ", which does not fit"
    return f"why: computed whole by every rank, a step is {seconds * 1e3:+.4g} ms and {num_bytes / 1e9:+.4g} GB{fits}"


def _runner_up(costs: PlanCosts, setting: PlanSetting) -> str:
    """The fastest plan that splits a main op differently or, with stages, has another number of stages."""
    plan = costs.plan
    if plan.plan_ngpus == 1:
        return ""
    other = _other_stages(plan, setting) if plan.stages else _other_splits(plan, setting)
    if other is None:
        return "runner-up: no other plan fits"
    found = plan_costs(other, setting)
    words = f"runner-up: {_ms(found.seconds)} ({_percent(found.seconds, costs.seconds)}) with {_gb(found.peak_bytes)}"
    layout = f"mesh {list(other.mesh)}" + (f", {len(other.stages)} stages" if other.stages else "")
    members: dict[str, list[Op]] = {}
    for key, block in blocks_of(plan.graph).items():
        members.setdefault(block, []).append(plan.graph.ops[key])
    lines: dict[str, None] = {}
    for block, ops in members.items():
        one, two = (_splits(side, ops, block) for side in (plan, other))
        if one != two or plan.mesh != other.mesh:
            lines[f"  {pattern(block) or 'the rest'}: {two}"] = None
    return "\n".join([f"{words}, {layout}", *lines])


def _percent(seconds: float, than: float) -> str:
    return f"{100 * (seconds / than - 1):+.2g}%"


def _other_splits(plan: Plan, setting: PlanSetting) -> Plan | None:
    graph = plan.graph
    choices = choices_on(graph, plan.mesh, setting)
    space = Space(
        graph,
        plan.mesh,
        setting,
        lambda op: list(dict.fromkeys([*choices(op), plan.split_of(op)])),
        recomputed=recomputed_ops(graph, plan.recompute),
    )
    taken = {
        number: one.choices.index(plan.split_of(one.ops[0]))
        for number, one in enumerate(space.classes)
        if _is_main(graph, one.ops[0])
    }
    try:
        return replace(space.plan(solve(space, excluded=[taken])), recompute=plan.recompute)
    except Infeasible:
        return None


def _other_stages(plan: Plan, setting: PlanSetting) -> Plan | None:
    size = plan.plan_ngpus
    numbers = tuple(n for n in range(1, size + 1) if size % n == 0 and n != len(plan.stages))
    try:
        return best_plan(plan.graph, setting, PlanRequest(num_stages=numbers))
    except ValueError:
        return None
