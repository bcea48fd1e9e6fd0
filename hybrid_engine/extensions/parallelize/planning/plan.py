"""A plan: how each op of a model is split over the processes of a unit, the stages, and the recomputed modules.

    plan = Plan.load("plan.json")
    plan.place("layers.*.mlp.up", out="n")
    print(plan.diff(other))

The file is JSON keyed by module paths. It holds only decisions: costs are computed when the plan is used.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.tensor import Placement

from hybrid_engine.extensions.parallelize.graph.annotations import SUMMED
from hybrid_engine.extensions.parallelize.graph.compute_config import (
    COUNT,
    TEXT,
    ValueRule,
    check,
    has_names,
    is_count,
    is_list_of,
    is_text,
    shown,
)
from hybrid_engine.extensions.parallelize.graph.graph import RESHAPES, Graph, Op, paths_around
from hybrid_engine.extensions.parallelize.graph.stage_ops import check_schedule, divide, stages_each

Names = tuple[str | None, ...]
"""For each axis of the mesh, the annotation's name along which an op is split; None if it is not split."""
DECISIONS = ("mesh", "splits", "stages", "recompute", "num_micro_batches", "schedule", "notes")
VERSION = 1
Shapes = Mapping[str, Sequence[int]]
FIELDS: Mapping[str, type] = {
    "version": int,
    "model": str,
    "parameters": dict,
    "mesh": list,
    "stages": list,
    "recompute": list,
    "num_micro_batches": int,
    "schedule": str,
    "notes": dict,
    "splits": dict,
}


def following(
    op: Op, placements: Mapping[str, Placement], mesh: Sequence[int], axis: int = 0, whole: Collection[str] = ()
) -> str | None:
    """The name along which `op` can read its operands over one axis in their current layout; None if there is none.

    `placements` holds the known placements of tensors. Tensors in `whole` must be read whole, unless their placement is
    known; all others may be cut.
    """
    known = {position: placements[key] for position, key in enumerate(op.inputs) if key in placements}
    known = {position: placement for position, placement in known.items() if not placement.is_replicate()}
    uncut = [position for position, key in enumerate(op.inputs) if key in whole and position not in known]
    for name in op.rule.annotation.candidates if known else ():
        wanted = op.rule.annotation.input_placements(name)
        names: list[str | None] = [None] * len(mesh)
        names[axis] = name
        lies_so = all(wanted[position] == placement for position, placement in known.items())
        if lies_so and all(wanted[position].is_replicate() for position in uncut) and op.rule.can_split(names, mesh):
            return name
    return None


def follow(plan: "Plan", ops: Collection[Op]) -> dict[str, Names]:
    """New names for each of `ops` that the plan does not split over some axis and that can follow its operands there.

    Partial sums are added up before they are read, except by reshapes in the module that made them.
    """
    found: dict[str, list[str | None]] = {}
    keys = {op.key for op in ops}
    activations = {key for key, value in plan.graph.values.items() if value.kind in ("result", "input")}
    makers = {key: op for op in plan.graph.ops.values() for key in op.outputs}
    for axis in range(len(plan.mesh)):
        placements: dict[str, Placement] = {}
        sums: set[str] = set()
        for op in plan.graph.ops.values():
            name = plan.split_of(op)[axis]
            if name is None and op.key in keys:
                name = following(op, placements, plan.mesh, axis, activations)
                if op.name in RESHAPES and op.inputs[0] in sums and makers[op.inputs[0]].path == op.path:
                    name = SUMMED
                if name is not None:
                    found.setdefault(op.key, list(plan.split_of(op)))[axis] = name
            if name is not None:
                given = op.rule.annotation.output_placements(name)
                made = op.by_result(given)
                placements |= {key: placement for key, placement in made.items() if placement.is_shard()}
                sums |= {key for key, placement in made.items() if placement.is_partial()}
    return {key: tuple(names) for key, names in found.items() if plan.graph.ops[key].rule.can_split(names, plan.mesh)}


@dataclass(kw_only=True)
class Plan:
    """The decisions of a plan, with the graph that they were made for."""

    graph: Graph
    mesh: tuple[int, ...]
    """The sizes of the axes over which ops are split; their product times the number of stages is `plan_ngpus`."""
    splits: dict[str, Names] = field(default_factory=dict)
    """Maps the key of an op to its names by axis. Every rank computes ops that are not listed."""
    stages: tuple[tuple[str, ...], ...] = ()
    """For each stage of a pipeline, the paths of its modules in execution order; empty for a plan with one stage."""
    recompute: tuple[str, ...] = ()
    """Paths, with globs, of modules whose activations are recomputed in the backward pass."""
    num_micro_batches: int = 1
    schedule: str = "1f1b"
    notes: dict[str, Any] = field(default_factory=dict)
    """Remarks by the policy that made the plan, such as its name. Stored in the file, otherwise unused."""

    @property
    def plan_ngpus(self) -> int:
        """Number of processes of a unit."""
        return prod(self.mesh) * max(len(self.stages) // stages_each(self.schedule), 1)

    def split_of(self, op: Op) -> Names:
        """The names along which `op` is split, by axis."""
        return self.splits.get(op.key, (None,) * len(self.mesh))

    def place(self, path: str, *, out: str | None, op: str = "*", axis: int = 0) -> list[str]:
        """Splits the ops of modules that match the glob `path` along `out` (None: not at all); returns their keys.

        `out` is a name of the op's annotation, or `+` for a sum that stays partial. `op` is a glob of op names. Ops
        without the name are unchanged. Raises ValueError if no op has it, or if it does not divide by the size of the
        axis.
        """
        if not 0 <= axis < len(self.mesh):
            raise ValueError(f"axis={axis} is none of the mesh {self.mesh}; give 0 to {len(self.mesh) - 1}")
        found = [o for o in self.graph.ops.values() if fnmatchcase(o.path, path) and fnmatchcase(o.name, op)]
        if not found:
            raise ValueError(f"place({path!r}): no module of the graph has an op; {nearest_paths(self.graph, path)}")
        changed = [o for o in found if out is None or out in o.rule.annotation.candidates]
        if not changed:
            texts = sorted({f"{o.name}: {o.rule.annotation}" for o in found})
            raise ValueError(f"place({path!r}): out={out!r} can be split in none of its ops; they are {texts}")
        for one in changed:
            names = list(self.split_of(one))
            names[axis] = out
            check_split(one, tuple(names), self.mesh)
        for one in changed:
            names = list(self.split_of(one))
            names[axis] = out
            self._set(one.key, tuple(names))
        return [one.key for one in changed]

    def follow(self, path: str = "*") -> list[str]:
        """Splits each op without a split, of the modules that match the glob, in the way of the results that it reads.

        An op that would need another layout of one of them, or that reads partial sums, is unchanged. Returns the keys
        of the changed ops.
        """
        found = follow(self, [op for op in self.graph.ops.values() if fnmatchcase(op.path, path)])
        for key, names in found.items():
            self._set(key, names)
        return list(found)

    def _set(self, key: str, names: Names) -> None:
        if any(names):
            self.splits[key] = names
        else:
            self.splits.pop(key, None)

    def check(self) -> None:
        """Raises ValueError if the plan does not fit its graph; the error names the op and the problem."""
        check_decisions({name: getattr(self, name) for name in DECISIONS}, "the plan")
        for key, names in self.splits.items():
            if key not in self.graph.ops:
                raise ValueError(f"the plan splits {key!r}, but the model has no such op; remove the line")
            check_split(self.graph.ops[key], names, self.mesh)

    def check_runs(self) -> None:
        """Raises ValueError for stages, schedules and micro-batches that cannot run or have no effect."""
        if self.stages:
            check_schedule(self.schedule, len(self.stages), self.num_micro_batches)
            self._check_stages()
            divide(self.graph, self.stages)
        elif self.schedule != "1f1b":
            raise ValueError(f"the plan has schedule={self.schedule!r} and no stages; name them, or leave it at '1f1b'")
        for path in self.recompute:
            if not any(fnmatchcase(around, path) for op in self.graph.ops.values() for around in paths_around(op.path)):
                raise ValueError(f"recompute={path!r} is no module of the graph; {nearest_paths(self.graph, path)}")

    def _check_stages(self) -> None:
        """Raises ValueError for a path of a stage that is not a module, or that two stages have."""
        known = {path for path, _ in self.graph.original.named_modules()}
        known |= {around for op in self.graph.ops.values() for around in paths_around(op.path)}
        stage_of: dict[str, int] = {}
        for number, paths in enumerate(self.stages):
            for path in paths:
                if path not in known:
                    raise ValueError(
                        f"stages[{number}] has {path!r}, which is no module; {nearest_paths(self.graph, path)}"
                    )
                if stage_of.setdefault(path, number) != number:
                    raise ValueError(f"stages {stage_of[path]} and {number} have {path!r}; leave it in one of them")

    def diff(self, other: "Plan") -> str:
        """The differences between this plan and another, one per line; empty if there are none."""
        lines = []
        for name in ("mesh", "stages", "recompute", "num_micro_batches", "schedule"):
            one, two = getattr(self, name), getattr(other, name)
            if one != two:
                lines.append(f"{name}: {one} -> {two}")
        keys = [key for key in self.graph.ops if key in self.splits or key in other.splits]
        keys += [key for key in other.graph.ops if key not in self.graph.ops and key in other.splits]
        for key in keys:
            one, two = (_words(plan.splits.get(key)) for plan in (self, other))
            if one != two:
                lines.append(f"{key}: {one} -> {two}")
        return "\n".join(lines)

    def for_graph(self, graph: Graph) -> "Plan":
        """The plan's decisions for arguments of other shapes, or the other mode; ValueError for another model.

        An op whose dimension does not divide there is computed whole by every rank. Ops that only the new graph has,
        such as dropout in training, are split to fit what they read.
        """
        if self.graph.signature != graph.signature and _uses_of_weights(self.graph) != _uses_of_weights(graph):
            raise ValueError(f"the plan is for another model: {difference(self.graph, graph)}")
        there = {key: names for key, names in self.splits.items() if key in graph.ops}
        fitting = {key: names for key, names in there.items() if _fits(graph.ops[key], names, self.mesh)}
        plan = Plan(graph=graph, **{name: getattr(self, name) for name in DECISIONS} | {"splits": fitting})
        for key, names in follow(plan, [op for key, op in graph.ops.items() if key not in self.graph.ops]).items():
            plan._set(key, names)
        return plan

    def to_json(self) -> dict[str, Any]:
        """The plan as its file stores it."""
        ops: dict[str, dict[str, Any]] = {}
        for key in (key for key in self.graph.ops if key in self.splits):
            path, op = key.split(":", 1)
            ops.setdefault(path, {})[op] = list(self.splits[key])
        return {
            "version": VERSION,
            "model": self.graph.signature,
            "parameters": shapes_of(self.graph),
            "mesh": list(self.mesh),
            "stages": [list(stage) for stage in self.stages],
            "recompute": list(self.recompute),
            "num_micro_batches": self.num_micro_batches,
            "schedule": self.schedule,
            "notes": self.notes,
            "splits": ops,
        }

    def save(self, path: str | Path) -> None:
        """Writes the plan's file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path, graph: Graph) -> "Plan":
        """Loads a plan for `graph`; ValueError for a plan of another model, another version, or an invalid one."""
        return cls.from_json(read_content(Path(path)), graph, str(path))

    @classmethod
    def from_json(cls, content: Any, graph: Graph, source: str = "the plan") -> "Plan":
        """The plan that `to_json` stored."""
        check_content(content, graph, source)
        check_decisions({name: content[name] for name in DECISIONS if name != "splits"}, source)
        splits = {f"{p}:{op}": tuple(names) for p, ops in content["splits"].items() for op, names in ops.items()}
        plan = cls(
            graph=graph,
            mesh=tuple(content["mesh"]),
            splits=splits,
            stages=tuple(tuple(stage) for stage in content["stages"]),
            recompute=tuple(content["recompute"]),
            num_micro_batches=content["num_micro_batches"],
            schedule=content["schedule"],
            notes=content["notes"],
        )
        plan.check()
        return plan


def _uses_of_weights(graph: Graph) -> dict[str, set[tuple[str, Sequence[int]]]]:
    """For each module, names and shapes of the parameters that its ops read. In evaluation the ops may differ."""
    parameters = graph.of_kind("parameter")
    found: dict[str, set[tuple[str, Sequence[int]]]] = {}
    for op in graph.ops.values():
        for key in parameters.keys() & set(op.inputs):
            found.setdefault(op.path, set()).add((key, tuple(parameters[key].shape)))
    return found


def _fits(op: Op, names: Names, mesh: Sequence[int]) -> bool:
    known = all(name is None or name in op.rule.annotation.candidates for name in names)
    return known and op.rule.can_split(names, mesh)


def check_split(op: Op, names: Sequence[str | None], mesh: Sequence[int]) -> None:
    """Raises ValueError unless `op` can be split along `names` over the axes of `mesh`."""
    if len(names) != len(mesh):
        raise ValueError(f"{op.key}: {list(names)} must have one entry for each axis of the mesh {list(mesh)}")
    unknown = [name for name in names if name is not None and name not in op.rule.annotation.candidates]
    if unknown:
        possible = list(op.rule.annotation.candidates)
        raise ValueError(
            f"{op.key} ('{op.rule.annotation}') cannot be split along {unknown[0]!r}; take one of {possible}"
        )
    if not op.rule.can_split(names, mesh):
        sizes = {name: op.rule.sizes.get(name) for name in names if name}
        raise ValueError(f"{op.key}: sizes {sizes} must divide by the mesh {list(mesh)}; split along another name")


def _words(names: Names | None) -> str:
    return ", ".join(name or "whole" for name in names) if names else "whole"


def nearest_paths(graph: Graph, path: str) -> str:
    """The hint in an error about a glob that matches no module."""
    near = get_close_matches(path, sorted({op.path for op in graph.ops.values()}), 3, 0.3)
    return f"the nearest are {near}" if near else "see graph.ops for the paths"


def _is_names(value: Any) -> bool:
    return is_list_of(value, lambda name: name is None or is_text(name))


def _is_json(value: Any) -> bool:
    try:
        return has_names(value) and bool(json.dumps(value))
    except (TypeError, ValueError):
        return False


RULES: Mapping[str, ValueRule] = {
    "mesh": ValueRule(
        lambda value: is_list_of(value, is_count) and len(value) > 0,
        "numbers of processes, one for each axis, at least 1 each",
    ),
    "splits": ValueRule(
        lambda value: has_names(value) and all(_is_names(names) for names in value.values()),
        "by the keys of ops a list of names or null, one for each axis of the mesh",
    ),
    "stages": ValueRule(
        lambda value: is_list_of(value, lambda stage: is_list_of(stage, is_text) and len(stage) > 0),
        "a list of module paths, at least one, for each stage",
    ),
    "recompute": ValueRule(lambda value: is_list_of(value, is_text), "a list of globs of module paths"),
    "num_micro_batches": COUNT,
    "schedule": TEXT,
    "notes": ValueRule(_is_json, "a dict that JSON can hold"),
}
"""Rules for the decisions of a plan."""


def check_decisions(decisions: Mapping[str, Any], source: str) -> None:
    """Raises ValueError for a decision that breaks its rule; does not check whether it fits a graph."""
    for name, value in decisions.items():
        check(f"{source}: {name}", value, RULES[name])


def read_content(path: Path) -> Any:
    """The content of a plan file; ValueError if it is not JSON, or has a key twice, one of which would be lost."""
    try:
        return json.loads(path.read_text(), object_pairs_hook=_without_repeats)
    except (OSError, UnicodeDecodeError, RecursionError, json.JSONDecodeError) as error:
        kind = "is no JSON" if isinstance(error, json.JSONDecodeError) else "cannot be read"
        raise ValueError(f"the plan file {path} {kind}: {error}; correct it, or make the plan anew") from error
    except ValueError as error:
        raise ValueError(f"the plan file {path} {error}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"has the key {key!r} twice, as {shown(found[key])} and {shown(value)}; keep one of them")
        found[key] = value
    return found


def check_content(content: Any, graph: Graph, source: str) -> None:
    """Raises ValueError unless `content`, of the file `source`, is a plan for `graph` with lists as splits."""
    if not isinstance(content, dict):
        raise ValueError(f"{source} must be an object with the keys {sorted(FIELDS)}")
    if not is_count(content.get("version")) or content["version"] != VERSION:
        raise ValueError(
            f"{source} has version={content.get('version')}, this is version {VERSION}; make the plan anew"
        )
    if set(content) != set(FIELDS):
        wrong = sorted(set(content) ^ set(FIELDS))
        raise ValueError(f"{source}: the keys {wrong} are missing or unknown; a plan has {sorted(FIELDS)}")
    for name, kind in FIELDS.items():
        if not isinstance(content[name], kind):
            raise ValueError(f"{source}: {name}={shown(content[name])} must be of type {kind.__name__}")
    for path, ops in content["splits"].items():
        if not isinstance(ops, dict) or not all(_is_names(names) for names in ops.values()):
            raise ValueError(
                f"{source}: splits[{path!r}]={shown(ops)} must map ops to lists of names or null, one for each axis of "
                "the mesh"
            )
    if content["model"] != graph.signature:
        raise ValueError(f"{source} is for another model: {_difference(content, graph)}")
    found = _of_shapes(content["parameters"], shapes_of(graph), "the plan", "the model")
    if found is not None:
        raise ValueError(f"{source}: {found}; parameters are the model's, put them back")


def _difference(content: Mapping[str, Any], graph: Graph) -> str:
    found = _of_shapes(content["parameters"], shapes_of(graph), "the plan", "the model")
    if found is not None:
        return found
    missing = [f"{p}:{op}" for p, ops in content["splits"].items() for op in ops if f"{p}:{op}" not in graph.ops]
    return f"it splits {missing[0]!r}, which the model lacks" if missing else "its ops are others"


def difference(one: Graph, other: Graph) -> str:
    """A description of the first difference between the models of two graphs."""
    found = _of_shapes(shapes_of(one), shapes_of(other), "one", "the other")
    if found is not None:
        return found
    for key in [*one.ops, *other.ops]:
        if key not in one.ops or key not in other.ops:
            return f"op {key} is in one of them alone"
    return "their ops read other tensors"


def shapes_of(graph: Graph) -> dict[str, list[int]]:
    """The shapes of a graph's parameters by name."""
    return {key: list(value.shape) for key, value in graph.of_kind("parameter").items()}


def _of_shapes(one: Shapes, other: Shapes, first: str, second: str) -> str | None:
    for key in [*one, *other]:
        if one.get(key) != other.get(key):
            return f"parameter {key} has shape {one.get(key)} in {first} and {other.get(key)} in {second}"
    return None
