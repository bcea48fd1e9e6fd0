"""Whether two texts mean the same in mathematics, by the library math-verify: `\\frac{1}{2}` and 0.5 do.

math-verify reads what stands between delimiters, and numbers in prose. An answer often is neither: `x^2+1`. What a text
answers is therefore looked for first: the last \\boxed{}, what stands in <answer> or after the last "answer is", or the
text itself if it is nothing but mathematics. As LaTeX between delimiters it is given to math-verify.
"""

import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from hybrid_engine.rlhf.rewards.time_limit import OutOfTime, within

KEPT_REFERENCES = 1024
"""References whose reading is kept: all answers to one question are compared with the same."""
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


def load_math_equivalence(spec: str, seconds: float) -> Callable[[str, str], bool]:
    """Compares a response with a reference; what takes longer than `seconds` is not the same.

    The function raises ValueError for a reference that holds no mathematics.

    Raises:
        ValueError: math-verify is not installed, with how to install it.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ValueError(
            f"--reward={spec!r} needs the library math-verify, which is not installed ({error}); install it with "
            "pip install 'hybrid-engine[math]'"
        ) from error
    # It warns that no limit of its own is set; ours is, and holds in threads too.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    @lru_cache(KEPT_REFERENCES)
    def read_reference(text: str) -> list[Any]:
        read = parse(as_mathematics(text), parsing_timeout=None) or parse(f"${text}$", parsing_timeout=None)
        if not read:
            raise ValueError("holds no mathematics that math-verify can read")
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
    """What `text` answers, as LaTeX between dollar signs; `text` itself where that is prose or has delimiters."""
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
    """What stands in the last \\boxed{}, and in those before it that only commas and "and" separate from it."""
    boxes: list[str] = []
    end_before = 0
    for start in _BOX.finditer(text):
        if start.start() < end_before:  # within the box before
            continue
        end = _closing(text, start.end(), "{}")
        if not _BETWEEN_BOXES.fullmatch(text[end_before : start.start()]):
            boxes.clear()
        boxes.append(text[start.end() : end])
        end_before = end + 1
    return [_unboxed(box) for box in boxes]


def as_latex(answer: str) -> str:
    """`answer` as LaTeX between dollar signs, with the names and signs that people write without it."""
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
    """`text` without the boxes in it; what stands in them stays."""
    parts: list[str] = []
    is_box: list[bool] = []  # of the brackets that are open
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
    """Where the bracket closes that is open at `start`, or the end of `text`."""
    depth = 1
    for index in range(start, len(text)):
        depth += (text[index] == brackets[0]) - (text[index] == brackets[1])
        if depth == 0:
            return index
    return len(text)


def _without_blanks(text: str) -> str:
    return re.sub(r"\s+", "", text)
