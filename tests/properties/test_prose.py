"""Docstrings name a thing or an action first, and pages avoid words that are not plain English."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.quick

FOLDERS = ("hybrid_engine", "containers", "ops", "recipes")
# Openings that name neither.
OPENING = re.compile(r"(Of|What|Those|Whoever|By|Such)\b")

# Words that hide the subject or that this project once used in a sense of its own, with what to write.
FORBIDDEN = {
    r"beside\b": "in addition to, next to, compared with",
    r"behind (?!a proxy)": "after",
    r"anew": "again",
    r"mend(?:s|ed|ing)?": "fix, remove",
    r"whoever|somebody|nobody": "the caller, no process, ...",
    r"(?:is|are) none\b(?! of)": "is not a ..., does not have a ...",
    r"there is not (?:any|yet|one)\b": "is not supported, does not exist",
    r"(?:has|have) not(?=[,.;:)]| \n)": "does not have",
}
# Pages whose sentences come from programs.
WRITTEN_BY_PROGRAMS = {"config.md", "models.md", "robustness.md", "scaling.md", "soak.md"}
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "MIGRATION.md", "benchmarks/README.md")),
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in WRITTEN_BY_PROGRAMS),
]


def strings_of(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string that stands alone as a statement."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def openings(source: str) -> list[int]:
    """The lines of strings that begin wrongly."""
    return [line for line, text in strings_of(source) if OPENING.match(text)]


def test_no_docstring_begins_with_a_word_that_names_nothing():
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert sum(len(list(strings_of(path.read_text()))) for path in paths) > 5000
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in openings(path.read_text())]
    assert not found, "\n".join(found)


def test_such_openings_are_found():
    assert openings('"""What it is."""\nx = 1\n"""Of that."""\n"""The number."""\n"""Whatever."""') == [1, 3]


def forbidden_words(page: str) -> list[str]:
    """Each forbidden word of a page with its line and what to write; code blocks and code spans are left out."""
    prose = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), page, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"`[^`\n]*`", "", prose)
    found = []
    for pattern, remedy in FORBIDDEN.items():
        for match in re.finditer(rf"\b(?:{pattern})", prose, re.IGNORECASE):
            found.append(f"{prose.count(chr(10), 0, match.start()) + 1}: {match[0].strip()!r}; write {remedy}")
    return found


def test_no_docstring_has_a_forbidden_word():
    tolerated = ("behind", "none")  # "behind one interface", "None if there is none" are English
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {each.partition(': ')[2]}"
        for path in paths
        for line, text in strings_of(path.read_text())
        for each in forbidden_words(text)
        if not any(word in each.partition(";")[0].lower() for word in tolerated)
    ]
    assert not found, "\n".join(found)


def test_no_page_has_a_forbidden_word():
    found = [f"{page.relative_to(ROOT)}:{each}" for page in PAGES for each in forbidden_words(page.read_text())]
    assert not found, "\n".join(found)


def test_forbidden_words_are_found_outside_of_code():
    assert forbidden_words("A `beside` is fine.\n```\nbeside\n```\nThis stands beside that.") == [
        "5: 'beside'; write in addition to, next to, compared with"
    ]
    assert forbidden_words("It has not, and there is none of it.") != []
    assert forbidden_words("It has not run yet. None of them is right.") == []
