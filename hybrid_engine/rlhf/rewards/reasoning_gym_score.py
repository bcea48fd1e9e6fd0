"""The reward `reasoning_gym`: what the library's own `score_answer` says of an answer, from 0 to 1.

    reasoning_gym                       the whole response is the answer, without blanks at both ends
    reasoning_gym:tag=answer            what stands in the last <answer>...</answer>; a response without it scores 0
    reasoning_gym:after=####            what follows the last ####; a response without it scores 0
    reasoning_gym:allow_eval=true       also where the library evaluates a response as Python to judge it

The columns `answer` and `metadata` say what is right and which data set judges; data sets `reasoning_gym:NAME` have
them. Many data sets give a part of 1 to an answer that is right in part, or is right and says more.
"""

import importlib
import json
import re
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

from hybrid_engine.rlhf.data.reasoning_gym_rows import LIBRARY, require_library
from hybrid_engine.rlhf.rewards.answers import Answers
from hybrid_engine.rlhf.rewards.spec_options import SpecOptions

Extract = Callable[[str], str | None]
"""From a response to the answer in it; None where there is none."""


EVALUATING = frozenset(
    [
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    ]
)
"""Data sets whose scores call Python's `eval`, or SymPy's parser that does, on what the model wrote."""


class JudgeAndCheck(NamedTuple):
    """The two functions of a `Rule`."""

    judge: Callable[[Answers], list[float]]
    check: Callable[[Mapping[str, Any]], None]


def build_judge(spec: str, given: str) -> JudgeAndCheck:
    """Scores answers by the data sets that their rows come from, and checks such rows.

    Raises:
        ValueError: the spec has an option that there is not, or the library is not installed.
    """
    options = SpecOptions(spec, given, {"tag": "", "after": "", "allow_eval": "false"})
    extract = _build_extract(spec, options.text("tag"), options.text("after"))
    if options.text("allow_eval") not in ("true", "false"):
        raise ValueError(f"--reward={spec!r}: allow_eval={options.text('allow_eval')!r} must be true or false")
    allows_eval = options.text("allow_eval") == "true"
    require_library(f"--reward={spec!r}")

    def judge(answers: Answers) -> list[float]:
        rows = zip(answers.responses, answers.columns["answer"], answers.columns["metadata"], strict=True)
        return [_score(extract(response), right, metadata) for response, right, metadata in rows]

    return JudgeAndCheck(judge, partial(check_columns, allows_eval=allows_eval))


def check_columns(columns: Mapping[str, Any], *, allows_eval: bool) -> None:
    """ValueError, in words that follow a row's place, where `metadata` names no data set that may judge."""
    metadata = columns["metadata"]
    name = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(
            "has metadata without the name of a reasoning-gym data set in source_dataset; take such rows by "
            "--dataset reasoning_gym:NAME, or choose another reward"
        )
    if name in EVALUATING and not allows_eval:
        raise ValueError(
            f"comes from {name!r}, and to judge that reasoning-gym runs what the model wrote as Python; allow it by "
            "--reward reasoning_gym:allow_eval=true where nothing can come to harm"
        )
    _find_scorer(name, json.dumps(metadata.get("source_config") or {}))


def _build_extract(spec: str, tag: str, after: str) -> Extract:
    if tag and after:
        raise ValueError(f"--reward={spec!r} must say either tag or after; leave one out")
    if tag:
        pattern = re.compile(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", re.DOTALL)
        return lambda response: next((found.strip() for found in pattern.findall(response)[::-1]), None)
    if after:
        return lambda response: response.rpartition(after)[2].strip() if after in response else None
    return str.strip


def _score(answer: str | None, right: Any, metadata: Mapping[str, Any]) -> float:
    if answer is None:
        return 0.0
    scorer = _find_scorer(metadata["source_dataset"], json.dumps(metadata.get("source_config") or {}))
    with warnings.catch_warnings():  # of parsers, about what a model wrote
        warnings.simplefilter("ignore")
        return float(scorer(answer, {"answer": right, "metadata": metadata}))


@lru_cache(maxsize=64)
def _find_scorer(name: str, config: str) -> Callable[[str, Mapping[str, Any]], float]:
    """The library's function for one data set; ValueError, as of `check_columns`, where it has none.

    Its options are a part of it: some data sets judge by the number of digits that they asked for.
    """
    library = importlib.import_module(LIBRARY)
    try:
        return library.create_dataset(name, **json.loads(config)).score_answer
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"comes from {name!r}, which reasoning-gym cannot judge: {error}") from error
