"""Constraints on plans, from a file: which splits ops may have, by globs of module paths.

- modules: model.layers.*.mlp.up_proj
  ops: linear          # a glob of op names; all of them where it is left out
  splits: [n, whole]   # names of the op's annotation; `whole`: not split
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op
from hybrid_engine.extensions.parallelize.planning.following import Names
from hybrid_engine.extensions.parallelize.planning.plan import nearest_paths

WHOLE = "whole"
KEYS = {"modules", "ops", "splits"}


@dataclass(frozen=True)
class Constraint:
    """Ops of modules that match `modules` are split along one of `splits`; those that have none of them are free."""

    modules: str
    ops: str
    splits: tuple[str, ...]

    def matches(self, op: Op) -> bool:
        """Whether the constraint says anything of `op`."""
        is_named = fnmatchcase(op.path, self.modules) and fnmatchcase(op.name, self.ops)
        return is_named and (WHOLE in self.splits or bool(set(self.splits) & set(op.rule.annotation.candidates)))

    def allows(self, names: Names) -> bool:
        """Whether an op may be split so."""
        return all((name or WHOLE) in self.splits for name in names)


def read_constraints(path: str | Path, graph: Graph) -> list[Constraint]:
    """The constraints of a YAML file; ValueError for what is none, and for one that no op of the graph matches."""
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
    """The `choices` that constraints allow; ValueError where nothing is left of an op's."""

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
