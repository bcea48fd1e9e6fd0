"""Rewards that are rules, by the names that `--reward` knows: 1 for a right answer and 0 for a wrong one, or a length.

    exact                       the response's answer is the reference, letter by letter
    number                      its last number equals the reference within a tolerance
    math                        both mean the same in mathematics (the library math-verify)
    regex:PATTERN               the pattern is found in the response
    length:target=200           0 at 200 tokens, -1 at none and at twice as many
    length:most=200             0 up to 200 tokens, -1 at twice as many
    reasoning_gym               the score of the library reasoning-gym (`reasoning_gym_score.py`)

`exact`, `number` and `math` read the reference from the data's column `answer`, or from another:
`number:column=solution,tolerance=0.01`. `after=TEXT` takes the response's answer, and the reference's, from what
follows the last TEXT, as `exact:after=####`; a response without it has no answer. Blanks at both ends do not count.
A reference may be a list of right answers, of which the response's must be one, or verl's `{"ground_truth": ...}`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_engine.rlhf.rewards.answers import Answers, UnusableReference
from hybrid_engine.rlhf.rewards.math_equivalence import load_math_equivalence
from hybrid_engine.rlhf.rewards.reasoning_gym_score import build_judge
from hybrid_engine.rlhf.rewards.spec_options import SpecOptions

GROUND_TRUTH = "ground_truth"
"""The key of a reference answer within verl's column `reward_model`."""
_WHOLE = r"(?:\d{1,3}(?:(?:,|\{,\}|,\\!)\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
# Behind a digit, a letter or a bracket a dash is no sign: 3-5 is a range or a difference, 2024-12 a date.
_SIGN = r"(?<![\w)\]}%])[-+\u2212\u2013\ufe63\uff0d]"
NUMBER = re.compile(rf"(?P<sign>{_SIGN})?[$€£¥]?(?P<first>{_DECIMAL})(?P<others>(?: ?[/\u2044] ?{_DECIMAL})*)")
_LATEX_FRACTION = re.compile(rf"\\[dt]?frac\{{({_DECIMAL})\}}\{{({_DECIMAL})\}}")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A reward that needs no model."""

    judge: Callable[[Answers], list[float]]
    columns: frozenset[str] = frozenset()
    """The columns of the data that it reads."""
    check: Callable[[Mapping[str, Any]], None] | None = None
    """Of `Reward`."""


def build_exact(spec: str, given: str) -> Rule:
    """1 where the response's answer is the reference, letter by letter."""
    options = SpecOptions(spec, given, {"column": "answer", "after": ""})
    return _compare(spec, options, lambda text, reference: text == reference)


def build_number(spec: str, given: str) -> Rule:
    """1 where the response's last number n is the reference's last number r: |n - r| <= tolerance * max(1, |r|)."""
    options = SpecOptions(spec, given, {"column": "answer", "after": "", "tolerance": 1e-6})
    tolerance = options.number("tolerance", smallest=0.0)

    def is_equal(text: str, reference: str) -> bool:
        number, right = last_number(text), last_number(reference)
        if right is None:
            raise ValueError("has no number in it")
        return number is not None and abs(number - right) <= tolerance * max(1.0, abs(right))

    return _compare(spec, options, is_equal)


def build_math(spec: str, given: str) -> Rule:
    """1 where the response's answer and the reference mean the same, by the library math-verify.

    An answer that it has not decided after `seconds` is wrong.
    """
    options = SpecOptions(spec, given, {"column": "answer", "after": "", "seconds": 5.0})
    return _compare(spec, options, load_math_equivalence(spec, options.number("seconds", smallest=1e-3)))


def build_regex(spec: str, given: str) -> Rule:
    """1 where the pattern, of Python's `re`, is found in the response."""
    try:
        pattern = re.compile(given)
    except re.error as error:
        raise ValueError(f"--reward={spec!r} has a pattern that is none: {error}; fix it") from error
    if not given:
        raise ValueError(f"--reward={spec!r} has no pattern; write regex:PATTERN")
    return Rule(judge=lambda answers: [float(pattern.search(text) is not None) for text in answers.responses])


def build_length(spec: str, given: str) -> Rule:
    """-penalty * |T - target| / target, or -penalty * max(0, T - most) / most, of T tokens, the end's included."""
    options = SpecOptions(spec, given, {"target": 0.0, "most": 0.0, "penalty": 1.0})
    target, most = (options.number(name, smallest=0.0) for name in ("target", "most"))
    penalty = options.number("penalty")
    if (target > 0) == (most > 0):
        raise ValueError(f"--reward={spec!r} must say either target or most, in tokens; write length:target=200")

    def distance(length: int) -> float:
        return abs(length - target) / target if target else max(0.0, length - most) / most

    return Rule(judge=lambda answers: [-penalty * distance(len(tokens)) for tokens in answers.response_ids])


def build_reasoning_gym(spec: str, given: str) -> Rule:
    """The score of the library reasoning-gym, from 0 to 1, by the data set that the question comes from."""
    judge, check = build_judge(spec, given)
    return Rule(judge=judge, columns=frozenset({"answer", "metadata"}), check=check)


BUILT_IN: dict[str, Callable[[str, str], Rule]] = {
    "exact": build_exact,
    "number": build_number,
    "math": build_math,
    "regex": build_regex,
    "length": build_length,
    "reasoning_gym": build_reasoning_gym,
}
"""From a name to what builds the rule from the whole spec and what stands in it behind the colon."""


def last_number(text: str) -> float | None:
    """The last number in `text` as a person reads it; None without one.

    With or without commas between thousands and a currency, with any minus sign; 3/4 and \\frac{3}{4} are 0.75, of a
    date the last number counts.
    """
    found = [*NUMBER.finditer(_LATEX_FRACTION.sub(r"\1/\2", text))]
    return _value_of(found[-1]) if found else None


def _value_of(number: re.Match[str]) -> float:
    first, *others = map(_decimal, re.split("[/\u2044]", number["first"] + number["others"]))
    if len(others) > 1 or others == [0.0]:
        return others[-1]
    value = first / others[0] if others else first
    return -value if number["sign"] not in (None, "+") else value


def _decimal(text: str) -> float:
    return float(re.sub(r"[,{}\\! ]", "", text))


def _compare(spec: str, options: SpecOptions, is_right: Callable[[str, str], bool]) -> Rule:
    """A rule that compares a response's answer with the reference; `is_right` refuses a reference by a ValueError."""
    column, after = options.text("column"), options.text("after")

    def judge(answers: Answers) -> list[float]:
        scores = []
        for index, (response, value) in enumerate(zip(answers.responses, answers.columns[column], strict=True)):
            try:
                scores.append(float(_is_right_answer(is_right, response, read_references(value, after), after)))
            except ValueError as error:
                raise UnusableReference(
                    f"--reward={spec!r}: {column}={value!r} of the prompt {answers.shown_prompt(index)} {error}; "
                    "fix the data"
                ) from error
        return scores

    def check(columns: Mapping[str, Any]) -> None:
        try:
            for reference in read_references(columns[column], after):
                is_right("", reference)
        except ValueError as error:
            raise ValueError(
                f"has {column}={columns[column]!r}, which {error} for --reward={spec!r}; fix it"
            ) from error

    return Rule(judge=judge, columns=frozenset({column}), check=check)


def _is_right_answer(is_right: Callable[[str, str], bool], response: str, references: list[str], after: str) -> bool:
    if after and after not in response:
        return False
    return any(is_right(_behind(response, after), reference) for reference in references)


def read_references(value: Any, after: str) -> list[str]:
    """The right answers that a row's value names, as text; ValueError, in words that follow the value, for none."""
    if isinstance(value, Mapping):
        if GROUND_TRUTH not in value:
            raise ValueError(f"is an object without {GROUND_TRUTH!r}")
        return read_references(value[GROUND_TRUTH], after)
    if isinstance(value, (list, tuple)):
        if not value:
            raise ValueError("is a list without an answer")
        return [reference for one in value for reference in read_references(one, after)]
    text = _behind(str(value), after)
    if value is None or value != value or not text:  # nan stands for a value that is missing
        raise ValueError("is no answer")
    return [text]


def _behind(text: str, mark: str) -> str:
    return (text.rpartition(mark)[2] if mark else text).strip()
