"""`metrics.jsonl`: one JSON line per step, read with our names whatever it was written with. Needs no torch."""

import json
from pathlib import Path
from typing import Any

from hybrid_engine.rlhf.runs.config_files import read_config
from hybrid_engine.rlhf.runs.metric_names import FRAMEWORKS, from_framework

METRICS = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, without a last one that was cut short; empty when there is no file.

    Raises:
        ValueError: a line is not a JSON object with a whole number as `step`.
    """
    if not path.exists():
        return []
    framework = read_config(path.parent).get("metric_names")
    framework = framework if framework in FRAMEWORKS else None
    text = path.read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [from_framework(_read_line(path, number, line), framework) for number, line in enumerate(lines, 1)]


def _read_line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{str(path)!r}, line {number}, is no JSON: {error}; restore or remove it") from error
    if not isinstance(content, dict) or not isinstance(content.get("step"), int):
        raise ValueError(f"{str(path)!r}, line {number}, must be an object with a whole number as step; remove it")
    return content
