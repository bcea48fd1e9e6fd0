"""The costs of a given plan from any source: seconds of a step, and bytes at each moment, by stage.

`best_stages` finds the division into stages with the lowest cost.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op
from hybrid_engine.extensions.parallelize.planning.choices import choices_of
from hybrid_engine.extensions.parallelize.planning.layouts import recomputed_ops, split_order, stage_ops
from hybrid_engine.extensions.parallelize.planning.op_costs import generation_bytes
from hybrid_engine.extensions.parallelize.planning.plan import Plan
from hybrid_engine.extensions.parallelize.planning.setting import Cost, Setting, peaks
from hybrid_engine.extensions.parallelize.planning.space import Space

Seconds = Callable[[int, int, int], float | None]
"""Seconds of a micro-batch in a stage, for (start segment, end segment, stage number); None: does not fit."""


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


def plan_costs(plan: Plan, setting: Setting) -> PlanCosts:
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


def transfer_seconds(graph: Graph, setting: Setting, ops: Sequence[Op], gradients: frozenset[str]) -> float:
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
