"""Which consecutive ops belong to one call of a module whose activations are computed again in the backward pass."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby

from hybrid_engine.extensions.parallelize.graph.graph import Graph


@dataclass(frozen=True)
class Block:
    """Consecutive ops that are run together."""

    ops: tuple[str, ...]
    read: tuple[str, ...]
    """Tensors from before the block."""
    given: tuple[str, ...]
    """Tensors of the block that are read after it."""
    is_recomputed: bool


def blocks_of(graph: Graph, ops: Sequence[str], globs: Sequence[str], kept: Iterable[str]) -> list[Block]:
    """The ops in blocks: those of modules that match one of `globs`, and those between; `kept` is read later."""
    last_read = dict.fromkeys(kept, len(ops))
    for position, op in enumerate(ops):
        last_read |= {key: max(position, last_read.get(key, 0)) for key in graph.ops[op].inputs}
    found = []
    runs = groupby(enumerate(ops), key=lambda entry: _module(graph.ops[entry[1]].path, globs))
    for module, entries in runs:
        positions, members = zip(*entries, strict=True)
        made = [key for op in members for key in graph.ops[op].outputs]
        read = {key: None for op in members for key in graph.ops[op].inputs if key not in made}
        given = tuple(key for key in made if last_read.get(key, -1) > positions[-1])
        found.append(Block(members, tuple(read), given, module is not None))
    return found


def _module(path: str, globs: Sequence[str]) -> str | None:
    """The outermost module around `path` that matches, None where none does."""
    parts = path.split(".")
    around = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return next((module for module in around if any(fnmatchcase(module, glob) for glob in globs)), None)
