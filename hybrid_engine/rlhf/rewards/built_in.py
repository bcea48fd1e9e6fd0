"""Rule-based rewards, by their names for `--reward`: 1 for a right answer and 0 for a wrong one, or a length penalty.

    exact                       the response's answer equals the reference, character by character
    number                      its last number equals the reference within a tolerance
    math                        both are mathematically equal (the library math-verify)
    regex:PATTERN               the pattern is found in the response
    length:target=200           0 at 200 tokens, -1 at none and at twice as many
    length:most=200             0 up to 200 tokens, -1 at twice as many
    reasoning_gym               the score of the library reasoning-gym

`exact`, `number` and `math` read the reference from the data's column `answer`, or from another:
`number:column=solution,tolerance=0.01`. `after=TEXT` takes the answer of response and reference from the text after the
last TEXT, such as `exact:after=####`; a response without it has no answer. Whitespace at both ends does not count. A
reference may be a list of right answers, of which the response's must be one, or verl's `{"ground_truth": ...}`; both
may be JSON text, as columns of CSV files have them.
"""

import importlib
import json
import logging
import math
import re
import unicodedata
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

from hybrid_engine.rlhf.data.data_files import LIBRARY, require_library
from hybrid_engine.rlhf.rewards.rewards import OutOfTime, within
from hybrid_engine.rlhf.rewards.scores import Answers, Judge, UnusableReference

GROUND_TRUTH = "ground_truth"
"""The key of a reference answer within verl's column `reward_model`."""
_WHOLE = r"(?:\d{1,3}(?:(?:,|\{,\}|,\\!)\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_DASH = r"[-+\u2212\u2013\ufe63\uff0d]"
# After a digit, a letter or a bracket a dash is not a sign: 3-5 is a range or a difference, 2024-12 a date. Before a
# space it is a sign only after = and a colon: elsewhere it may begin an item of a list.
_SIGN = rf"(?:(?<![\w)\]}}%]){_DASH}|(?:(?<=[=:])|(?<=[=:] )){_DASH} )"
_MIXED = r"(?:(?P<whole>\d+) +(?=\d+ ?[/\u2044] ?\d))?"
NUMBER = re.compile(rf"(?P<sign>{_SIGN})?[$€£¥]?{_MIXED}(?P<first>{_DECIMAL})(?P<others>(?: ?[/\u2044] ?{_DECIMAL})*)")
_LATEX_FRACTION = re.compile(
    rf"(?P<before>-?)\\[dt]?frac(?:\{{(?P<above>-?{_DECIMAL})\}}\{{(?P<below>-?{_DECIMAL})\}}|(?P<a>\d)(?P<b>\d))"
)
_FRACTION_SIGN = re.compile("[\u00bc-\u00be\u2150-\u215e]")
Extract = Callable[[str], str | None]
"""Returns the answer in a response; None if there is none."""
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
"""Datasets whose scores call Python's `eval`, or SymPy's parser that does, on the model's output."""
KEPT_REFERENCES = 1024
"""Number of parsed references that are cached: all answers to one question are compared with the same."""
_FUNCTIONS = "sqrt|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp|pi"
_SHORT_WORDS = "am|an|as|at|be|by|do|he|if|in|is|it|me|my|no|of|on|so|to|up|us|we"
_WORD = re.compile(
    rf"(?<![\\a-zA-Z])(?!(?:{_FUNCTIONS}|and|or)(?![a-zA-Z]))(?:[a-zA-Z]{{3,}}|(?:{_SHORT_WORDS})(?![a-zA-Z]))"
)
_NAMED = re.compile(r"\\(?:text\w*|math\w+|operatorname|begin|end)\s*\{[^{}]*\}")
_DELIMITED = re.compile(r"(?<!\\)\$.*(?<!\\)\$|\\\(.*\\\)|\\\[.*\\\]", re.DOTALL)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ANNOUNCED = re.compile(r"\banswer(?: is:?|:)\s*(.*?)(?:[.!](?=\s|$)|\n|$)", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACKET = re.compile(rf"{_BOX.pattern}|[{{}}]")
_BETWEEN_BOXES = re.compile(r"[\s,;$]*(?:and|or)?[\s,;$]*")
_SYMBOLS = {
    "\u2212": "-", "\u2013": "-", "\ufe63": "-", "\uff0d": "-", "\u00d7": r"\times ", "÷": r"\div ", "·": r"\cdot ",
    "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∈": r"\in ",
    "\u222a": r"\cup ", "∩": r"\cap ", "°": r"^\circ ", "²": "^2", "³": "^3",
}  # fmt: skip
_AS_LATEX = (
    (re.compile(r"\\?\$|^[\s*`]+|[\s*`.,;]+$"), ""),  # currency, Markdown, the end of a sentence
    (re.compile(r"(?<=\d)\s*(?:mm|cm|km|ft)(?:\s*\^\s*\{?[23]\}?)?$"), ""),
    (re.compile(r"(?<!\\)%"), r"\\%"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\s(?:and|or)\s|\\text\{\s*(?:and|or)\s*\}"), ", "),
    (re.compile(r"(?<=\d)[eE]([-+]?\d+)"), r"\\times 10^{\1}"),
    (re.compile(r"(?<![\d.,])(\d+) +(\d+)/(\d+)"), r"\1\\frac{\2}{\3}"),
    (re.compile(rf"(?<![\\a-zA-Z])({_FUNCTIONS})(?![a-zA-Z])"), r"\\\1"),
)
_ROOT = re.compile(r"\\sqrt\s*\(")


class SpecOptions:
    """`name=value` pairs after the colon of a spec, on top of their defaults.

    A value ends at a comma and may contain `=`.
    """

    def __init__(self, spec: str, given: str, defaults: Mapping[str, str | float]):
        """Raises ValueError for text that is not a pair, or names an option that is not among `defaults`."""
        self._spec = spec
        self._values: dict[str, str | float] = dict(defaults)
        for pair in given.split(",") if given else []:
            name, equals, value = pair.partition("=")
            if not equals or name not in defaults:
                raise ValueError(
                    f"--reward={spec!r}: {pair!r} is not one of its options; write name=value pairs, separated by "
                    f"commas, with the names {', '.join(defaults)}"
                )
            self._values[name] = value

    def text(self, name: str) -> str:
        """The option as text."""
        return str(self._values[name])

    def number(self, name: str, smallest: float = -math.inf) -> float:
        """The option as a finite number; ValueError if it is not one or is below `smallest`."""
        try:
            number = float(self._values[name])
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < smallest:
            rule = "a number" if smallest == -math.inf else f"a number of at least {smallest:g}"
            raise ValueError(f"--reward={self._spec!r}: {name}={self._values[name]!r} must be {rule}; fix it")
        return number


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A reward that does not need a model."""

    judge: Judge
    columns: frozenset[str] = frozenset()
    """The columns of the data that it reads."""
    references: frozenset[str] = frozenset()
    """As in `Reward`."""
    check: Callable[[Mapping[str, Any]], None] | None = None
    """As in `Reward`."""


def build_exact(spec: str, given: str) -> Rule:
    """1 if the response's answer equals the reference, character by character."""
    options = SpecOptions(spec, given, {"column": "answer", "after": ""})
    return _compare(spec, options, lambda text, reference: text == reference, may_be_json=True)


def build_number(spec: str, given: str) -> Rule:
    """1 if the response's last number n equals the reference's last number r: |n - r| <= tolerance * max(1, |r|)."""
    options = SpecOptions(spec, given, {"column": "answer", "after": "", "tolerance": 1e-6})
    tolerance = options.number("tolerance", smallest=0.0)

    def is_equal(text: str, reference: str) -> bool:
        number, right = last_number(text), last_number(reference)
        if right is None:
            raise ValueError("has no number in it")
        return number is not None and abs(number - right) <= tolerance * max(1.0, abs(right))

    return _compare(spec, options, is_equal)


def build_math(spec: str, given: str) -> Rule:
    """1 if the response's answer and the reference are equal according to the library math-verify.

    An answer that it has not decided after `seconds` is wrong.
    """
    options = SpecOptions(spec, given, {"column": "answer", "after": "", "seconds": 5.0})
    return _compare(spec, options, load_math_equivalence(spec, options.number("seconds", smallest=1e-3)))


def build_regex(spec: str, given: str) -> Rule:
    """1 if the pattern, of Python's `re`, is found in the response."""
    try:
        pattern = re.compile(given)
    except re.error as error:
        raise ValueError(f"--reward={spec!r} has an invalid pattern: {error}; fix it") from error
    if not given:
        raise ValueError(f"--reward={spec!r} has no pattern; write regex:PATTERN")
    return Rule(judge=lambda answers: [float(pattern.search(text) is not None) for text in answers.responses])


def build_length(spec: str, given: str) -> Rule:
    """-penalty * |T - target| / target, or -penalty * max(0, T - most) / most, for T tokens including the end token."""
    options = SpecOptions(spec, given, {"target": 0.0, "most": 0.0, "penalty": 1.0})
    target, most = (options.number(name, smallest=0.0) for name in ("target", "most"))
    penalty = options.number("penalty")
    if (target > 0) == (most > 0):
        raise ValueError(f"--reward={spec!r} must set either target or most, in tokens; write length:target=200")

    def distance(length: int) -> float:
        return abs(length - target) / target if target else max(0.0, length - most) / most

    return Rule(judge=lambda answers: [-penalty * distance(len(tokens)) for tokens in answers.response_ids])


def build_reasoning_gym(spec: str, given: str) -> Rule:
    """The score of the library reasoning-gym, from 0 to 1, according to the question's dataset."""
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
"""Builders of rules by name; each gets the whole spec and the part of it after the colon."""


def last_number(text: str) -> float | None:
    """The last number in `text` as a person reads it; None if there is none.

    Accepts commas between thousands, a currency, and any minus sign; 3/4, \\frac{3}{4} and its own character are 0.75,
    1 1/2 is 1.5, and of a date the last number counts.
    """
    text = _FRACTION_SIGN.sub(lambda sign: " " + unicodedata.normalize("NFKC", sign[0]), text)
    found = [*NUMBER.finditer(_LATEX_FRACTION.sub(_as_quotient, text))]
    return _value_of(found[-1]) if found else None


def _as_quotient(fraction: re.Match[str]) -> str:
    above, below = fraction["above"] or fraction["a"], fraction["below"] or fraction["b"]
    is_negative = (fraction["before"] + above + below).count("-") % 2
    return f" {'-' if is_negative else ''}{above.lstrip('-')}/{below.lstrip('-')}"


def _value_of(number: re.Match[str]) -> float:
    first, *others = map(_decimal, re.split("[/\u2044]", number["first"] + number["others"]))
    if len(others) > 1 or others == [0.0]:
        return others[-1]
    value = int(number["whole"] or 0) + (first / others[0] if others else first)
    return -value if (number["sign"] or "+").strip() != "+" else value


def _decimal(text: str) -> float:
    return float(re.sub(r"[,{}\\! ]", "", text))


def _compare(
    spec: str, options: SpecOptions, is_right: Callable[[str, str], bool], *, may_be_json: bool = False
) -> Rule:
    """A rule that compares a response's answer with the reference; `is_right` raises ValueError for a bad reference.

    `may_be_json`: an answer may be JSON text itself.
    """
    column, after = options.text("column"), options.text("after")
    read = partial(read_references, after=after, may_be_json=may_be_json)

    def judge(answers: Answers) -> list[float]:
        scores = []
        for index, (response, value) in enumerate(zip(answers.responses, answers.columns[column], strict=True)):
            try:
                scores.append(float(_is_right_answer(is_right, response, read(value), after)))
            except ValueError as error:
                raise UnusableReference(
                    f"--reward={spec!r}: {column}={value!r} of the prompt {answers.shown_prompt(index)} {error}; "
                    "fix the data"
                ) from error
        return scores

    def check(columns: Mapping[str, Any]) -> None:
        try:
            for reference in read(columns[column]):
                is_right("", reference)
        except ValueError as error:
            raise ValueError(
                f"has {column}={columns[column]!r}, which {error} for --reward={spec!r}; fix it"
            ) from error

    return Rule(judge=judge, columns=frozenset({column}), references=frozenset({column}), check=check)


def _is_right_answer(is_right: Callable[[str, str], bool], response: str, references: list[str], after: str) -> bool:
    if after and after not in response:
        return False
    return any(is_right(_behind(response, after), reference) for reference in references)


def read_references(value: Any, after: str, *, may_be_json: bool) -> list[str]:
    """The right answers in a row's value, as text; ValueError, with a message that follows the value, without any.

    JSON text of an object or of a list of strings stands for that object or list. With `may_be_json` the text is a
    right answer too, and the only one if it is an object without a ground truth.
    """
    read = partial(read_references, after=after, may_be_json=may_be_json)
    if isinstance(value, Mapping):
        if GROUND_TRUTH not in value:
            raise ValueError(f"is an object without {GROUND_TRUTH!r}")
        return read(value[GROUND_TRUTH])
    if isinstance(value, (list, tuple)):
        if not value:
            raise ValueError("is a list without an answer")
        return [reference for one in value for reference in read(one)]
    text = _behind(str(value), after)
    held = _read_json(text)
    if isinstance(held, Mapping) and may_be_json and GROUND_TRUTH not in held:
        return [text]
    if held is not None:
        return [*read(held), *([text] if may_be_json else [])]
    if value is None or value != value or not text:  # nan stands for a missing value
        raise ValueError("is no answer")
    return [text]


def _read_json(text: str) -> dict[str, Any] | list[str] | None:
    """The object or the list of strings that `text` is in JSON; None for any other text."""
    if text[:1] not in ("{", "["):
        return None
    try:
        held = json.loads(text)
    except (ValueError, RecursionError):  # such as the interval [0, 1)
        return None
    if isinstance(held, list) and not all(isinstance(one, str) for one in held):
        return None  # in mathematics a list of numbers is an answer
    return held or None


def _behind(text: str, mark: str) -> str:
    return (text.rpartition(mark)[2] if mark else text).strip()


class JudgeAndCheck(NamedTuple):
    """The two functions of a `Rule`."""

    judge: Callable[[Answers], list[float]]
    check: Callable[[Mapping[str, Any]], None]


def build_judge(spec: str, given: str) -> JudgeAndCheck:
    """A function that scores answers by the datasets of their rows, and one that checks such rows.

    Raises:
        ValueError: the spec has an unknown option, or the library is not installed.
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
    """Raises ValueError, with a message that follows a row's place, if `metadata` names no permitted dataset."""
    metadata = columns["metadata"]
    name = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(
            "has metadata without the name of a reasoning-gym dataset in source_dataset; use such rows through "
            "--dataset reasoning_gym:NAME, or choose another reward"
        )
    if name in EVALUATING and not allows_eval:
        raise ValueError(
            f"comes from {name!r}, for which reasoning-gym executes the model's answer as Python; allow that with "
            "--reward reasoning_gym:allow_eval=true in an isolated environment"
        )
    _find_scorer(name, json.dumps(metadata.get("source_config") or {}))


def _build_extract(spec: str, tag: str, after: str) -> Extract:
    if tag and after:
        raise ValueError(f"--reward={spec!r} must set only one of tag and after; leave one out")
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
    with warnings.catch_warnings():  # from parsers, about the model's output
        warnings.simplefilter("ignore")
        return float(scorer(answer, {"answer": right, "metadata": metadata}))


@lru_cache(maxsize=64)
def _find_scorer(name: str, config: str) -> Callable[[str, Mapping[str, Any]], float]:
    """The library's function for one dataset; ValueError, as from `check_columns`, if there is none.

    It depends on the dataset's options: some datasets judge by the number of digits that they asked for.
    """
    library = importlib.import_module(LIBRARY)
    try:
        return library.create_dataset(name, **json.loads(config)).score_answer
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"comes from {name!r}, which reasoning-gym cannot judge: {error}") from error


def load_math_equivalence(spec: str, seconds: float) -> Callable[[str, str], bool]:
    """A function that compares a response with a reference; a comparison that takes longer than `seconds` is False.

    The function raises ValueError for a reference without mathematics.

    Raises:
        ValueError: math-verify is not installed; the message says how to install it.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ValueError(
            f"--reward={spec!r} needs the library math-verify, which is not installed ({error}); install it with "
            "pip install 'hybrid-engine[math]'"
        ) from error
    # It warns that its own time limit is off; ours is on, and works in threads too.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    @lru_cache(KEPT_REFERENCES)
    def read_reference(text: str) -> list[Any]:
        read = parse(as_mathematics(text), parsing_timeout=None) or parse(f"${text}$", parsing_timeout=None)
        if not read:
            raise ValueError("contains no mathematics that math-verify can parse")
        return read

    def is_equal(text: str, reference: str) -> bool:
        right = read_reference(reference)

        def judge() -> bool:
            answer = as_mathematics(text)
            is_same_text = _without_blanks(answer) == _without_blanks(as_mathematics(reference))
            return is_same_text or verify(right, parse(answer, parsing_timeout=None), timeout_seconds=None)

        try:
            return within(seconds, judge)
        except OutOfTime:
            return False

    return is_equal


def as_mathematics(text: str) -> str:
    """The answer in `text`, as LaTeX between dollar signs; `text` itself if it is prose or has delimiters."""
    tagged = _TAGGED.findall(text)
    text = (tagged[-1] if tagged else text).strip()
    boxes = last_boxes(text)
    if boxes:
        return as_latex(", ".join(boxes))
    if _DELIMITED.search(text):
        return text
    announced = _ANNOUNCED.findall(text)
    answer = announced[-1] if announced else text
    return as_latex(answer) if is_mathematics(answer) else text


def is_mathematics(text: str) -> bool:
    """Whether `text` is one line without words."""
    return bool(text.strip()) and "\n" not in text and not _WORD.search(_NAMED.sub("", text))


def last_boxes(text: str) -> list[str]:
    """The content of the last \\boxed{}, and of earlier ones that only commas and "and" separate from it."""
    boxes: list[str] = []
    end_before = 0
    for start in _BOX.finditer(text):
        if start.start() < end_before:  # within the previous box
            continue
        end = _closing(text, start.end(), "{}")
        if not _BETWEEN_BOXES.fullmatch(text[end_before : start.start()]):
            boxes.clear()
        boxes.append(text[start.end() : end])
        end_before = end + 1
    return [_unboxed(box) for box in boxes]


def as_latex(answer: str) -> str:
    """`answer` as LaTeX between dollar signs, with plain names and symbols converted to commands."""
    if _DELIMITED.search(answer):
        return answer
    for symbol, command in _SYMBOLS.items():
        answer = answer.replace(symbol, command)
    for pattern, replacement in _AS_LATEX:
        answer = pattern.sub(replacement, answer)
    while root := _ROOT.search(answer):
        end = _closing(answer, root.end(), "()")
        answer = f"{answer[: root.start()]}\\sqrt{{{answer[root.end() : end]}}}{answer[end + 1 :]}"
    return f"${answer}$"


def _unboxed(text: str) -> str:
    """`text` without the boxes in it; their content stays."""
    parts: list[str] = []
    is_box: list[bool] = []  # for each open bracket
    end_before = 0
    for bracket in _BRACKET.finditer(text):
        closes = bracket[0] == "}"
        is_of_a_box = (is_box.pop() if is_box else False) if closes else len(bracket[0]) > 1
        if not closes:
            is_box.append(is_of_a_box)
        parts.append(text[end_before : bracket.start() if is_of_a_box else bracket.end()])
        end_before = bracket.end()
    return "".join([*parts, text[end_before:]])


def _closing(text: str, start: int, brackets: str) -> int:
    """The position of the bracket that closes the one before `start`, or the end of `text`."""
    depth = 1
    for index in range(start, len(text)):
        depth += (text[index] == brackets[0]) - (text[index] == brackets[1])
        if depth == 0:
            return index
    return len(text)


def _without_blanks(text: str) -> str:
    return re.sub(r"\s+", "", text)
