"""What lies in `gen_savedir`: the plan, what it was made for, and the traced graph where somebody asked for it."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_engine.distributed.processes import get_rank
from hybrid_engine.extensions.parallelize.compute_config import ReuseType
from hybrid_engine.extensions.parallelize.planning.plan_contents import read_content

PLAN_FILE, MADE_FOR_FILE = "plan.json", "made_for.json"
TRACE_FILE, TRACE_KEY_FILE = "graph.pt2", "graph.sha256"
FILES = (PLAN_FILE, MADE_FOR_FILE, TRACE_FILE, TRACE_KEY_FILE)


@dataclass(frozen=True)
class Kept:
    """A plan as its file holds it."""

    content: dict[str, Any]
    made_for: Mapping[str, Any]
    is_new: bool
    """Whether it was made now."""


def kept_plan(
    folder: Path,
    made_for: Mapping[str, Any],
    reuse: ReuseType,
    check: Callable[[Any, str], dict[str, Any]],
    make: Callable[[], dict[str, Any]],
) -> Kept:
    """The plan of the folder where `reuse` says so and it fits, checked by `check(content, file)`, else what `make`
    gives, which is kept. What was there is removed before. ValueError where it must fit and does not, and for the file
    of a plan that somebody made unreadable.
    """
    made_for = json.loads(json.dumps(made_for, default=str))
    before = _made_for(folder) if reuse in (ReuseType.MATCH, ReuseType.MOO) else None
    if before is not None:
        differing = [key for key in made_for if before.get(key) != made_for[key]]
        if not differing:
            content = read_content(folder / PLAN_FILE)
            return Kept(check(content, str(folder / PLAN_FILE)), made_for, is_new=False)
        if reuse is ReuseType.MATCH:
            raise ValueError(
                f"{folder} holds a plan for another {', '.join(differing)}; pass reuse='moo' to make it anew, or "
                "another instance_name to keep both"
            )
    _remove_plan(folder)
    found = Kept(make(), made_for, is_new=True)
    write_plan(folder, found)
    return found


@contextmanager
def removed_on_error(folder: Path, reuse: ReuseType) -> Iterator[None]:
    """Around what comes before a plan is made: where it fails, no plan stays that `reuse` does not ask to match."""
    try:
        yield
    except Exception:
        if reuse is not ReuseType.MATCH and get_rank() == 0:
            _remove_plan(folder)
        raise


def _remove_plan(folder: Path) -> None:
    for name in (MADE_FOR_FILE, PLAN_FILE):
        (folder / name).unlink(missing_ok=True)


def write_plan(folder: Path, kept: Kept) -> None:
    """Writes the files of a plan; what it was made for last, so that a plan that was cut off counts for nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MADE_FOR_FILE).unlink(missing_ok=True)
    (folder / PLAN_FILE).write_text(json.dumps(kept.content, indent=1) + "\n")
    (folder / MADE_FOR_FILE).write_text(json.dumps(kept.made_for, indent=1) + "\n")


def _made_for(folder: Path) -> dict[str, Any] | None:
    """What the plan in the folder was made for, None where there is none that is complete."""
    try:
        found = json.loads((folder / MADE_FOR_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) and (folder / PLAN_FILE).exists() else None


def stored_trace(folder: Path, key: str) -> bytes | None:
    """The traced graph of the folder, None where there is none of that key."""
    try:
        is_same = (folder / TRACE_KEY_FILE).read_text() == key
        return (folder / TRACE_FILE).read_bytes() if is_same else None
    except FileNotFoundError:
        return None


def write_trace(folder: Path, key: str, content: bytes) -> None:
    """Writes a traced graph; its key last, so that a file that was cut off counts for nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRACE_KEY_FILE).unlink(missing_ok=True)
    (folder / TRACE_FILE).write_bytes(content)
    (folder / TRACE_KEY_FILE).write_text(key)
