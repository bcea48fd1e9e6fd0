"""Rewards that are rules, by the names that `--reward` knows: 1 for a right answer and 0 for a wrong one, or a length.

    exact                       the response's answer is the reference, letter by letter
    number                      its last number equals the reference within a tolerance
    math                        both mean the same in mathematics (the library math-verify)
    regex:PATTERN               the pattern is found in the response
    length:target=200           0 at 200 tokens, -1 at none and at twice as many
    length:most=200             0 up to 200 tokens, -1 at twice as many

`exact`, `number` and `math` read the reference from the data's column `answer`, or from another:
`number:column=solution,tolerance=0.01`. `after=TEXT` takes the response's answer, and the reference's, from what
follows the last TEXT, as `exact:after=####`; a response without it has no answer. Blanks at both ends do not count.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_engine.recipes.rewards.answers import Answers, UnusableReference
from hybrid_engine.recipes.rewards.math_equivalence import load_math_equivalence
from hybrid_engine.recipes.rewards.spec_options import SpecOptions

NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)\.\d*|\.\d+)?(?:(?<=[\d.])[eE][-+]?\d+)?")


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
        raise ValueError(f"--reward={spec!r} has a pattern that is none: {error}; mend it") from error
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


BUILT_IN: dict[str, Callable[[str, str], Rule]] = {
    "exact": build_exact,
    "number": build_number,
    "math": build_math,
    "regex": build_regex,
    "length": build_length,
}
"""From a name to what builds the rule from the whole spec and what stands in it behind the colon."""


def last_number(text: str) -> float | None:
    """The last number in `text`, with or without commas between thousands; None without one."""
    found = [match for match in NUMBER.findall(text) if any(character.isdigit() for character in match)]
    return float(found[-1].replace(",", "")) if found else None


def _compare(spec: str, options: SpecOptions, is_right: Callable[[str, str], bool]) -> Rule:
    """A rule that compares a response's answer with the reference; `is_right` refuses a reference by a ValueError."""
    column, after = options.text("column"), options.text("after")

    def judge(answers: Answers) -> list[float]:
        scores = []
        for index, (response, reference) in enumerate(zip(answers.responses, answers.columns[column], strict=True)):
            try:
                scores.append(float(_is_right_answer(is_right, response, _reference(reference, after), after)))
            except ValueError as error:
                raise UnusableReference(
                    f"--reward={spec!r}: {column}={reference!r} of the prompt {answers.shown_prompt(index)} {error}; "
                    "mend the data"
                ) from error
        return scores

    def check(columns: Mapping[str, Any]) -> None:
        try:
            is_right("", _reference(columns[column], after))
        except ValueError as error:
            raise ValueError(
                f"has {column}={columns[column]!r}, which {error} for --reward={spec!r}; mend it"
            ) from error

    return Rule(judge=judge, columns=frozenset({column}), check=check)


def _is_right_answer(is_right: Callable[[str, str], bool], response: str, reference: str, after: str) -> bool:
    if after and after not in response:
        return False
    return is_right(_behind(response, after), reference)


def _reference(value: Any, after: str) -> str:
    text = _behind(str(value), after)
    if value is None or not text:
        raise ValueError("is no answer")
    return text


def _behind(text: str, mark: str) -> str:
    return (text.rpartition(mark)[2] if mark else text).strip()
