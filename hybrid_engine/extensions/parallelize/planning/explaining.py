"""`explain(plan)`: how each block is split and why, its time and memory, and the runner-up."""

from collections.abc import Sequence
from dataclasses import replace

from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op
from hybrid_engine.extensions.parallelize.options.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.planning.autodist import Wanted, best_plan, choices_on
from hybrid_engine.extensions.parallelize.planning.classes import pattern
from hybrid_engine.extensions.parallelize.planning.layouts import blocks_of, recomputed_ops
from hybrid_engine.extensions.parallelize.planning.op_costs import ATTENTION
from hybrid_engine.extensions.parallelize.planning.options import OPTION_NAMES, Options
from hybrid_engine.extensions.parallelize.planning.plan import Plan
from hybrid_engine.extensions.parallelize.planning.plan_costs import PlanCosts, plan_costs
from hybrid_engine.extensions.parallelize.planning.programme import Infeasible, solve
from hybrid_engine.extensions.parallelize.planning.setting import ZERO, Cost, Setting
from hybrid_engine.extensions.parallelize.planning.space import Space


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


def _summary(costs: PlanCosts, setting: Setting) -> str:
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


def _blocks(costs: PlanCosts, setting: Setting) -> str:
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
    """How the ops that read parameters, and attention, are split."""
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


def _why(costs: PlanCosts, setting: Setting, ops: Sequence[Op]) -> str:
    """The change in time and memory if every rank computes these ops whole."""
    plan = costs.plan
    kept = {key: names for key, names in plan.splits.items() if key not in {op.key for op in ops}}
    whole = plan_costs(replace(plan, splits=kept), setting)
    seconds, num_bytes = whole.seconds - costs.seconds, whole.peak_bytes - costs.peak_bytes
    fits = "" if whole.peak_bytes <= setting.memory_bytes else ", which does not fit"
    return f"why: computed whole by every rank, a step is {seconds * 1e3:+.4g} ms and {num_bytes / 1e9:+.4g} GB{fits}"


def _runner_up(costs: PlanCosts, setting: Setting) -> str:
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


def _other_splits(plan: Plan, setting: Setting) -> Plan | None:
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


def _other_stages(plan: Plan, setting: Setting) -> Plan | None:
    size = plan.plan_ngpus
    numbers = tuple(n for n in range(1, size + 1) if size % n == 0 and n != len(plan.stages))
    try:
        return best_plan(plan.graph, setting, Wanted(num_stages=numbers))
    except ValueError:
        return None
