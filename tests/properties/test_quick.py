"""`make quick` is a selection of tests that leaves no room out."""

import ast

import pytest

from tests.properties.test_import_direction import MAPPED, imported_names
from tests.support.paths import ROOT

pytestmark = pytest.mark.quick


def test_the_quick_tests_import_something_of_every_room():
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.quick" in path.read_text()]
    imported = {name for file in files for name in imported_names(ast.parse(file.read_text()))}
    rooms = {folder.parent.name for folder in (ROOT / "hybrid_engine").glob("*/__init__.py")} | {*MAPPED}
    assert len(rooms) > 10
    assert rooms <= {name.split(".")[1] for name in imported if name.startswith("hybrid_engine.")}
