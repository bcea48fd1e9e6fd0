"""What the file of a plan must hold, and for which model it was made."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_engine.extensions.parallelize.graph.graph import Graph
from hybrid_engine.extensions.parallelize.values import (
    COUNT,
    TEXT,
    Rule,
    check,
    has_names,
    is_count,
    is_list_of,
    is_text,
    shown,
)

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


def _is_names(value: Any) -> bool:
    return is_list_of(value, lambda name: name is None or is_text(name))


def _is_json(value: Any) -> bool:
    try:
        return has_names(value) and bool(json.dumps(value))
    except (TypeError, ValueError):
        return False


RULES: Mapping[str, Rule] = {
    "mesh": Rule(
        lambda value: is_list_of(value, is_count) and len(value) > 0,
        "numbers of processes, one for each axis, at least 1 each",
    ),
    "splits": Rule(
        lambda value: has_names(value) and all(_is_names(names) for names in value.values()),
        "by the keys of ops a list of names or null, one for each axis of the mesh",
    ),
    "stages": Rule(
        lambda value: is_list_of(value, lambda stage: is_list_of(stage, is_text) and len(stage) > 0),
        "a list of module paths, at least one, for each stage",
    ),
    "recompute": Rule(lambda value: is_list_of(value, is_text), "a list of globs of module paths"),
    "num_micro_batches": COUNT,
    "schedule": TEXT,
    "notes": Rule(_is_json, "a dict that JSON can hold"),
}
"""Of a plan's decisions."""


def check_decisions(decisions: Mapping[str, Any], source: str) -> None:
    """ValueError for a decision of another kind than its rule says; whether it fits a graph is not looked at."""
    for name, value in decisions.items():
        check(f"{source}: {name}", value, RULES[name])


def read_content(path: Path) -> Any:
    """What the file of a plan holds; ValueError for what is no JSON, or has a key twice, of which one would be lost."""
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
    """ValueError unless `content`, of the file `source`, is a plan for `graph`, and its splits lists of names."""
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
    """The first thing in which the models of two graphs differ."""
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
