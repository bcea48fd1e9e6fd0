"""`make quick` is a selection of tests that leaves no room out."""

import ast
import re
from pathlib import Path

from tests.properties.test_import_direction import MAPPED, ROOT, imported_names

TESTS = Path(__file__).parent


def test_the_quick_tests_import_something_of_every_room():
    (names,) = re.findall(r"^QUICK := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    files = [TESTS / f"test_{name}.py" for name in names.replace("\\", "").split()]
    imported = {name for file in files for name in imported_names(ast.parse(file.read_text()))}
    rooms = {folder.parent.name for folder in (ROOT / "hybrid_engine").glob("*/__init__.py")} | {*MAPPED}
    assert len(rooms) > 10
    assert rooms <= {name.split(".")[1] for name in imported if name.startswith("hybrid_engine.")}
