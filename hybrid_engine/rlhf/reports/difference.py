"""`hybrid-engine diff RUN_A RUN_B`: options that differ, and the first step and figures at which two runs differ."""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_engine.rlhf.runs.run_folder import ANSWERS, METRICS, read_answers, read_config, read_metrics

DESCRIPTION = """Compares two runs: different options, and the first step and metric that differ.

Times, speeds and --out are not compared. The exit status is that of diff(1): 0 if the runs are the same, 1 if they
differ, 2 if one cannot be read."""
SAME, DIFFERENT = 0, 1
_PLACE = "out"
_ABSENT = "absent"


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


def main(arguments: Sequence[str]) -> int:
    """Prints how the two runs that `arguments` name differ; returns the exit status.

    Raises:
        ValueError: one of them cannot be read, or the tolerance is not a finite number of at least 0.
    """
    parser = argparse.ArgumentParser(
        prog="hybrid-engine diff",
        description=DESCRIPTION,
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
