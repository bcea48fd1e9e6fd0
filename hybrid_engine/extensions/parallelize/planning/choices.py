"""The splits of an op that a planner considers, and the user's constraints on them.

`autodist` and `plan_costs` pass these functions to `Space`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from torch.distributed.tensor import Placement

from hybrid_engine.extensions.parallelize.graph.code import RESHAPES
from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op
from hybrid_engine.extensions.parallelize.library.annotations import SUMMED
from hybrid_engine.extensions.parallelize.planning.following import Names, following
from hybrid_engine.extensions.parallelize.planning.op_costs import split_degree
from hybrid_engine.extensions.parallelize.planning.plan import Plan, nearest_paths
from hybrid_engine.extensions.parallelize.planning.setting import Setting
from hybrid_engine.extensions.parallelize.planning.stage_policies import batch_plan
from hybrid_engine.extensions.parallelize.planning.tensor_parallel import is_product

WHOLE = "whole"
KEYS = {"modules", "ops", "splits"}


def all_choices(mesh: Sequence[int], setting: Setting) -> Callable[[Op], list[Names]]:
    """All splits of an op over a mesh that divide its sizes and make no more parts than allowed."""

    def choices(op: Op) -> list[Names]:
        names = product(*(((None, *op.rule.annotation.candidates) if size > 1 else (None,)) for size in mesh))
        fitting = [found for found in names if op.rule.can_split(found, mesh)]
        limit = setting.max_partition_degree
        return [found for found in fitting if split_degree(op.rule, found, mesh) <= limit]

    return choices


def batch_choices(graph: Graph, mesh: Sequence[int], setting: Setting) -> Callable[[Op], list[Names]]:
    """Splits that put the batch on the first axis of the mesh where possible, with all splits over the other axes."""
    splits_of_batch, anything = batch_plan(graph, mesh), all_choices(mesh, setting)

    def choices(op: Op) -> list[Names]:
        first = splits_of_batch.split_of(op)[0]
        return [names for names in anything(op) if names[0] == first] or [splits_of_batch.split_of(op)]

    return choices


def eager_choices(graph: Graph, size: int) -> Callable[[Op], list[Names]]:
    """Splits that module hooks support: columns of products with parameters, splits that follow, and rows.

    A module's own code works on parts of features and heads. It would take parts of samples or positions for all of
    them.
    """
    plan = Plan(graph=graph, mesh=(size,))
    products = [op for op in graph.ops.values() if is_product(op, graph)]
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
            found.setdefault(op.key, []).append((SUMMED,))  # summed where it leaves the module
    return lambda op: [(None,), *found.get(op.key, [])]


def _made(plan: Plan, op: Op) -> dict[str, Placement]:
    given = op.rule.output_placements(plan.split_of(op))
    made = {key: given[int(key.rsplit("/", 1)[1])][0] for key in op.outputs}
    return {key: placement for key, placement in made.items() if placement.is_shard()}


def choices_of(plan: Plan) -> Callable[[Op], list[Names]]:
    """Only the split that the plan has for each op."""
    return lambda op: [plan.split_of(op)]


@dataclass(frozen=True)
class Constraint:
    """Requires that ops of modules that match `modules` are split along one of `splits`, if they have one."""

    modules: str
    ops: str
    splits: tuple[str, ...]

    def matches(self, op: Op) -> bool:
        """Whether the constraint applies to `op`."""
        is_named = fnmatchcase(op.path, self.modules) and fnmatchcase(op.name, self.ops)
        return is_named and (WHOLE in self.splits or bool(set(self.splits) & set(op.rule.annotation.candidates)))

    def allows(self, names: Names) -> bool:
        """Whether the constraint allows a split along `names`."""
        return all((name or WHOLE) in self.splits for name in names)


def read_constraints(path: str | Path, graph: Graph) -> list[Constraint]:
    """The constraints of a YAML file; ValueError for an invalid one, and for one that matches no op of the graph."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"partition_constraints_path={str(path)!r} cannot be read: {error}") from error
    if not isinstance(content, list):
        raise ValueError(f"{path} must be a list of entries with the keys {sorted(KEYS)}")
    return [_constraint(entry, f"{path}, entry {number}", graph) for number, entry in enumerate(content)]


def _constraint(entry: Any, place: str, graph: Graph) -> Constraint:
    if not isinstance(entry, dict) or not {"modules", "splits"} <= set(entry) <= KEYS:
        raise ValueError(f"{place}: {entry!r} must have the keys 'modules' and 'splits', and may have 'ops'")
    splits = entry["splits"]
    if not isinstance(splits, list) or not splits or not all(isinstance(name, str) for name in splits):
        raise ValueError(f"{place}: splits={splits!r} must be a list of names, or of {WHOLE!r}")
    found = Constraint(str(entry["modules"]), str(entry.get("ops", "*")), tuple(splits))
    named = [op for op in graph.ops.values() if fnmatchcase(op.path, found.modules) and fnmatchcase(op.name, found.ops)]
    if not named:
        raise ValueError(
            f"{place}: no op matches {found.modules!r}, {found.ops!r}; {nearest_paths(graph, found.modules)}"
        )
    possible = {name for op in named for name in op.rule.annotation.candidates} | {WHOLE}
    if unknown := sorted(set(splits) - possible):
        raise ValueError(f"{place}: no op of {found.modules!r} has {unknown}; they have {sorted(possible)}")
    return found


def constrained(
    choices: Callable[[Op], list[Names]], constraints: Sequence[Constraint], mesh: Sequence[int]
) -> Callable[[Op], list[Names]]:
    """The `choices` that the constraints allow; ValueError if none is left for an op."""

    def allowed(op: Op) -> list[Names]:
        matching = [constraint for constraint in constraints if constraint.matches(op)]
        found = [names for names in choices(op) if all(constraint.allows(names) for constraint in matching)]
        if not found and max(mesh) > 1:
            splits = [list(constraint.splits) for constraint in matching]
            raise ValueError(
                f"{op.key}: the constraints allow {splits} alone, of which none divides its sizes "
                f"{dict(op.rule.sizes)} by the mesh {list(mesh)}; allow {WHOLE!r}"
            )
        return found or choices(op)

    return allowed
