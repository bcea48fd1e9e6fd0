"""`answers.jsonl`: what the same prompts are answered as training goes on, for `hybrid-engine report`. Needs no torch.

One line per evaluation and prompt:

    {"step": 10, "prompt": "12+7=", "responses": ["19", "18"], "rewards": [1.0, 0.0], "lengths": [2, 2],
     "tokens": [["1", "9"], ["1", "8"]], "logprobs": [[-0.1, -0.3], [-0.1, -1.2]]}

`step` is how many steps were done before: 0 is the untrained model. `responses`, `rewards` and `lengths` are those of
this evaluation. `tokens` and `logprobs` are about the answers of the *first* evaluation: their tokens as text, and how
likely the weights of this step find each, in nats. So the same tokens are followed through the run. `tokens` may stand
in the first evaluation's lines alone. Whatever a recipe does not know is left out.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ANSWERS = "answers.jsonl"


@dataclass(frozen=True, kw_only=True)
class PromptAnswers:
    """The answers to one prompt at one evaluation; G of them."""

    prompt: str
    responses: Sequence[str]
    """G texts"""
    rewards: Sequence[float | None]
    """G numbers; None for an answer that no reward judges"""
    lengths: Sequence[int] | None = None
    """G: tokens of each response"""
    tokens: Sequence[Sequence[str]] | None = None
    """the tokens of each answer of the first evaluation"""
    logprobs: Sequence[Sequence[float]] | None = None
    """of each of those tokens under the present weights, in nats"""
    extra: Mapping[str, Sequence[Any]] | None = None
    """G values for each name that reward functions gave to `log_extra`"""

    def __post_init__(self) -> None:
        assert len(self.rewards) == len(self.responses), f"{len(self.rewards)=} {len(self.responses)=}"
        assert self.lengths is None or len(self.lengths) == len(self.responses), f"{self.lengths=}"


def write_answers(folder: Path, step: int, answers: Sequence[PromptAnswers]) -> None:
    """Puts the answers after `step` steps into `answers.jsonl`, in place of those that it had of this step.

    The lines of other steps stay: a run that goes on finds what it had written. For one process.
    """
    kept = [line for line in read_answers(folder / ANSWERS) if line["step"] != step]
    fresh = [{"step": step} | {k: v for k, v in asdict(entry).items() if v is not None} for entry in answers]
    lines = sorted([*kept, *fresh], key=lambda line: line["step"])
    unfinished = folder / f".{ANSWERS}"
    unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    unfinished.replace(folder / ANSWERS)


def read_answers(path: Path) -> list[dict[str, Any]]:
    """The lines of an `answers.jsonl`, by step; empty when there is no file.

    Raises:
        ValueError: a line is not what the top of this module says.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return sorted((_read_line(path, n, line) for n, line in enumerate(lines, 1)), key=lambda line: line["step"])


def _read_line(path: Path, number: int, text: str) -> dict[str, Any]:
    place = f"{str(path)!r}, line {number},"
    try:
        line = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{place} is no JSON: {error}; restore or remove it") from error
    kinds = {"step": int, "prompt": str, "responses": list, "rewards": list}
    for name, kind in kinds.items():
        if not isinstance(line, dict) or not isinstance(line.get(name), kind):
            raise ValueError(f"{place} needs a {name} of type {kind.__name__}; restore or remove it")
    if len(line["rewards"]) != len(line["responses"]):
        raise ValueError(f"{place} needs a reward, or null, for each response; restore or remove it")
    return line
