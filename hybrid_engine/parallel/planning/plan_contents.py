"""What the file of a plan must hold, and for which model it was made."""

from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_engine.parallel.graph.graph import Graph

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


def check_content(content: Any, graph: Graph, source: str) -> None:
    """ValueError unless `content`, of the file `source`, is a plan for `graph`; its splits are not looked at."""
    if not isinstance(content, dict):
        raise ValueError(f"{source} must be an object with the keys {sorted(FIELDS)}")
    if content.get("version") != VERSION:
        raise ValueError(
            f"{source} has version={content.get('version')}, this is version {VERSION}; make the plan anew"
        )
    if set(content) != set(FIELDS):
        wrong = sorted(set(content) ^ set(FIELDS))
        raise ValueError(f"{source}: the keys {wrong} are missing or unknown; a plan has {sorted(FIELDS)}")
    for name, kind in FIELDS.items():
        if not isinstance(content[name], kind):
            raise ValueError(f"{source}: {name}={content[name]!r} must be of type {kind.__name__}")
    if content["model"] != graph.signature:
        raise ValueError(f"{source} is for another model: {_difference(content, graph)}")
    if not all(isinstance(n, list) for ops in content["splits"].values() for n in ops.values()):
        raise ValueError(f"{source}: splits must map module paths to ops to lists of names, one for each axis")


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
