"""Docstrings, and the strings below fields and constants, name a thing or an action first."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.quick

FOLDERS = ("hybrid_engine", "containers", "ops", "recipes")
# Openings that name neither.
OPENING = re.compile(r"(Of|What|Those|Whoever|By|Such)\b")


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
