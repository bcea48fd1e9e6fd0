"""Compares and shows finished runs: `hybrid-engine diff` and `hybrid-engine report`. Does not need torch.

`diff` prints options that differ, and the first step and figures at which two runs differ. `report` writes one HTML
page that shows a run, or compares several. The page needs no network and no server: its style, its script and the data
of the runs are in it. It may contain text that a model or a stranger wrote, so the data is JSON in which no tag can
end, the script inserts it as text, and the page's own policy forbids every script and style but its own two, by their
SHA-256.
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
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hybrid_engine.rlhf.runs.run_folder import (
    ANSWERS,
    METRICS,
    TEACHER,
    read_answers,
    read_config,
    read_metrics,
    read_teacher_figures,
)

DIFF_DESCRIPTION = """Compares two runs: different options, and the first step and metric that differ.

Times, speeds and --out are not compared. The exit status is that of diff(1): 0 if the runs are the same, 1 if they
differ, 2 if one cannot be read."""
SAME, DIFFERENT = 0, 1
_PLACE = "out"
_ABSENT = "absent"
REPORT_DESCRIPTION = """Writes one HTML page that shows a run or compares several.

The page shows curves of all metrics with a slider over the steps, the answers to the same prompts during training, the
use of time and memory, and the options. It is one file that needs no network."""
SCRIPTS = ("helpers.js", "curves.js", "answers.js", "tables.js", "page.js")
MARK = "<!-- hybrid-engine report -->"
"""A mark in the second line of every page that this module writes: such a file may be replaced."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run as read from its folder; files that the folder does not have are empty."""

    name: str
    """The folder, as it was named."""
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    """One entry per step, with our names."""
    result: dict[str, Any]
    samples: list[dict[str, Any]]
    answers: list[dict[str, Any]]
    """Lines of `answers.jsonl`, by step."""
    teacher: list[dict[str, Any]]
    """Lines of `teacher.jsonl`, by step."""


def read_run(name: str) -> RunData:
    """Reads the run in the folder `name`.

    Raises:
        ValueError: naming the folder or the file: it does not belong to a run, or is damaged.
    """
    folder = Path(name)
    if not folder.is_dir():
        raise ValueError(f"{name!r} is not a folder; give the folder of a run, with its {METRICS}")
    if not (folder / METRICS).is_file():
        raise ValueError(f"{name!r} has no {METRICS}, so it is not the folder of a run; {_advice(folder)}")
    return RunData(
        name=name,
        config=read_config(folder),
        metrics=read_metrics(folder / METRICS),
        result=_read_json(folder / "result.json", dict),
        samples=_read_samples(folder / "samples.json"),
        answers=read_answers(folder / ANSWERS),
        teacher=read_teacher_figures(folder / TEACHER),
    )


def is_time(figure: str) -> bool:
    """Whether a figure is a duration or a speed, which differs from run to run."""
    return figure.endswith(("_seconds", "_ms")) or "_per_second" in figure


def _advice(folder: Path) -> str:
    near = [path.parent for place in (folder, folder.absolute().parent) for path in sorted(place.glob(f"*/{METRICS}"))]
    return f"did you mean {str(near[0])!r}?" if near else "give the --out of a recipe"


def _read_samples(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = _read_json(path, list)
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{str(path)!r} must hold a list of JSON objects; restore or remove it")
    return rows


def _read_json(path: Path, kind: Any) -> Any:
    if not path.exists():
        return kind()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as JSON: {error}; restore or remove it") from error
    if not isinstance(content, kind):
        raise ValueError(f"{str(path)!r} must hold a JSON {kind.__name__}; restore or remove it")
    return content


def print_difference(arguments: Sequence[str]) -> int:
    """Prints how the two runs that `arguments` name differ; returns the exit status.

    Raises:
        ValueError: one of them cannot be read, or the tolerance is not a finite number of at least 0.
    """
    parser = argparse.ArgumentParser(
        prog="hybrid-engine diff",
        description=DIFF_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run_a", metavar="RUN_A", help="folder of a run, with its metrics.jsonl")
    parser.add_argument("run_b", metavar="RUN_B", help="folder of the other run")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="VALUE",
        help="largest difference of two equal numbers, relative to the larger one, or absolute if that is below 1 "
        "(default: 0, bitwise)",
    )
    given = parser.parse_args(arguments)
    if not 0 <= given.tolerance < math.inf:
        raise ValueError(f"--tolerance={given.tolerance} must be finite and at least 0; change it")
    first, second = read_run(given.run_a), read_run(given.run_b)
    lines = [*compare_options(first, second), *compare_figures(first, second, given.tolerance)]
    print("\n".join(lines or [f"no difference in {_extent(first)}"]))
    return DIFFERENT if lines else SAME


def compare_options(first: RunData, second: RunData) -> list[str]:
    """A line per option that differs."""
    if bool(first.config) != bool(second.config):
        return [f"options: only {(first if first.config else second).name} has a config.yaml"]
    names = [name for name in first.config | second.config if name != _PLACE]
    pairs = {name: (first.config.get(name, _ABSENT), second.config.get(name, _ABSENT)) for name in names}
    return [f"option {name}: {_show(a)} | {_show(b)}" for name, (a, b) in pairs.items() if a != b]


def compare_figures(first: RunData, second: RunData, tolerance: float) -> list[str]:
    """A line per figure that differs at the first step where any does, or a line about a step that only one run has."""
    lines_a, lines_b = ({line["step"]: line for line in run.metrics} for run in (first, second))
    for step in sorted(lines_a.keys() | lines_b.keys()):
        if step not in lines_a or step not in lines_b:
            return [f"step {step}: only {(first if step in lines_a else second).name} has it"]
        a, b = lines_a[step], lines_b[step]
        names = [name for name in a | b if not is_time(name)]
        apart = [name for name in names if not is_same(a.get(name, _ABSENT), b.get(name, _ABSENT), tolerance)]
        if apart:
            return [f"step {step}: {name} {_show_pair(a.get(name, _ABSENT), b.get(name, _ABSENT))}" for name in apart]
    return []


def is_same(a: Any, b: Any, tolerance: float) -> bool:
    """Whether two figures are the same; NaN equals itself."""
    if not (isinstance(a, (int, float)) and isinstance(b, (int, float))):
        return bool(a == b)
    if a == b or (math.isnan(a) and math.isnan(b)):
        return True
    return abs(a - b) <= tolerance * max(1.0, abs(a), abs(b))


def _show_pair(a: Any, b: Any) -> str:
    apart = f" (apart by {abs(a - b):.3g})" if isinstance(a, (int, float)) and isinstance(b, (int, float)) else ""
    return f"{_show(a)} | {_show(b)}{apart}"


def _show(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _extent(run: RunData) -> str:
    figures = {name for line in run.metrics for name in line if not is_time(name)} - {"step"}
    return f"{len(run.metrics)} steps of {len(figures)} figures"


def write_page(arguments: Sequence[str]) -> int:
    """Writes the page and prints its path; returns the exit status 0.

    Raises:
        ValueError: a run cannot be read, or the page cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="hybrid-engine report",
        description=REPORT_DESCRIPTION,
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
        "teacher": [_plain(line) for line in run.teacher],
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
