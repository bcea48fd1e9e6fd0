"""`hybrid-engine report RUN [RUN ...]`: writes one HTML page that shows a run, or compares several.

The page needs no network and no server: its style, its script and the data of the runs are in it. It may contain text
that a model or a stranger wrote, so the data is JSON in which no tag can end, the script inserts it as text, and the
page's own policy forbids every script and style but its own two, by their SHA-256.
"""

import argparse
import base64
import hashlib
import html
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hybrid_engine.rlhf.reports.difference import RunData, compare_figures, read_run

DESCRIPTION = """Writes one HTML page that shows a run or compares several.

The page shows curves of all metrics with a slider over the steps, the answers to the same prompts during training, the
use of time and memory, and the options. It is one file that needs no network."""
SCRIPTS = ("helpers.js", "curves.js", "answers.js", "tables.js", "page.js")
MARK = "<!-- hybrid-engine report -->"
"""A mark in the second line of every page that this module writes: such a file may be replaced."""


def main(arguments: Sequence[str]) -> int:
    """Writes the page and prints its path; returns the exit status 0.

    Raises:
        ValueError: a run cannot be read, or the page cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="hybrid-engine report",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, with its metrics.jsonl")
    parser.add_argument("--out", metavar="FILE", help="the page (default: report.html in the first run's folder)")
    parser.add_argument(
        "--prompts", type=int, default=64, metavar="NUMBER", help="number of prompts to show answers to (default: 64)"
    )
    given = parser.parse_args(arguments)
    if given.prompts < 0:
        raise ValueError(f"--prompts={given.prompts} must be at least 0; raise it")
    path = Path(given.out or Path(given.runs[0]) / "report.html")
    runs = [read_run(name) for name in dict.fromkeys(given.runs)]
    check_replaceable(path)
    try:
        path.write_text(build_page(runs, given.prompts), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--out={str(path)!r} cannot be written: {error.strerror}; choose another file") from error
    print(path)
    return 0


def check_replaceable(path: Path) -> None:
    """Raises ValueError if `path` is a file that no report wrote."""
    if path.is_dir():
        raise ValueError(f"--out={str(path)!r} is a folder; give a file in it")
    if path.exists() and MARK.encode() not in path.read_bytes()[:200]:
        raise ValueError(f"--out={str(path)!r} is a file that `report` did not write; choose another name")


def build_page(runs: Sequence[RunData], num_prompts: int) -> str:
    """The page about `runs`, with the answers to at most `num_prompts` prompts."""
    style = read_asset("page.css")
    script = "\n".join(read_asset(name) for name in SCRIPTS)
    names = short_names([run.name for run in runs])
    contents = [{"name": name} | run_content(run, num_prompts) for name, run in zip(names, runs, strict=True)]
    data = {"runs": contents, "differences": list(_differences(runs, names))}
    parts = {
        "title": html.escape(", ".join(names)),
        "style": style,
        "style hash": content_hash(style),
        "script": script,
        "script hash": content_hash(script),
        "data": embed(data),
        "version": version("hybrid-engine"),
    }
    # In a single pass: inserted text is not searched for further marks.
    return re.sub(r"\{\{([a-z ]+)\}\}", lambda found: parts[found.group(1)], read_asset("page.html"))


def short_names(names: Sequence[str]) -> list[str]:
    """The folders' names relative to their common folder; a single name as it is."""
    paths = [os.path.abspath(name) for name in names]
    if len(names) == 1:
        return list(names)
    return [os.path.relpath(path, os.path.commonpath(paths)) for path in paths]


def read_asset(name: str) -> str:
    """The text of a file in the folder of this module."""
    return resources.files("hybrid_engine.rlhf.reports").joinpath(name).read_text(encoding="utf-8")


def content_hash(text: str) -> str:
    """The name of a script or style in a Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def embed(data: Any) -> str:
    """JSON for an HTML script element: without `<` it neither ends the element nor begins a comment."""
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")


def run_content(run: RunData, num_prompts: int) -> dict[str, Any]:
    """The page's data of a run; lists over its steps, with None where a figure has no value."""
    names = [name for name in dict.fromkeys(name for line in run.metrics for name in line) if name != "step"]
    prompts = set(list(dict.fromkeys(answer["prompt"] for answer in run.answers))[:num_prompts])
    return {
        "steps": [line["step"] for line in run.metrics],
        "figures": {name: [_plain(line.get(name)) for line in run.metrics] for name in names},
        "options": {name: _plain(value) for name, value in run.config.items()},
        "result": _flatten(run.result),
        "samples": [{str(name): _plain(cell) for name, cell in row.items()} for row in run.samples],
        "answers": [_plain(answer) for answer in run.answers if answer["prompt"] in prompts],
    }


def _differences(runs: Sequence[RunData], names: Sequence[str]) -> Iterator[str]:
    """A line on where each run differs from the first, bit for bit."""
    for run, name in zip(runs[1:], names[1:], strict=True):
        lines = compare_figures(runs[0], run, tolerance=0.0)
        both = f"{names[0]} and {name}"
        yield f"{both} part at {lines[0]}" if lines else f"{both} have the same figures, times aside"


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: NaN and infinity as text, so that they are visible; floats with six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, (bool, int, str)) or value is None else str(value)


def _flatten(result: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested figures by names with dots."""
    flat: dict[str, Any] = {}
    for name, value in result.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: _plain(value)}
    return flat
