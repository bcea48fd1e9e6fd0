"""What is in the folder of a run, read for those who look at it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_engine.rlhf.runs.answers_log import ANSWERS, read_answers
from hybrid_engine.rlhf.runs.config_files import read_config
from hybrid_engine.rlhf.runs.metrics_file import METRICS, read_metrics


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run as its folder tells it; what a folder has not is empty."""

    name: str
    """the folder, as it was named"""
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    """one entry per step, with our names"""
    result: dict[str, Any]
    samples: list[dict[str, Any]]
    answers: list[dict[str, Any]]
    """lines of `answers.jsonl`, by step"""


def read_run(name: str) -> RunData:
    """Reads the run in the folder `name`.

    Raises:
        ValueError: naming the folder or the file: it is no run's, or damaged.
    """
    folder = Path(name)
    if not folder.is_dir():
        raise ValueError(f"{name!r} is no folder; give the folder of a run, which has a {METRICS}")
    if not (folder / METRICS).is_file():
        raise ValueError(f"{name!r} has no {METRICS}, so it is no run's folder; {_advice(folder)}")
    return RunData(
        name=name,
        config=read_config(folder),
        metrics=read_metrics(folder / METRICS),
        result=_read_json(folder / "result.json", dict),
        samples=_read_samples(folder / "samples.json"),
        answers=read_answers(folder / ANSWERS),
    )


def is_time(figure: str) -> bool:
    """Whether a figure says how long something took or how fast it went: such differ from run to run."""
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
