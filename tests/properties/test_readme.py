"""The README's example runs as it stands, and the tree of docs/structure.md names every file there is."""

import re

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.quick

README = (ROOT / "README.md").read_text()
STRUCTURE = (ROOT / "docs" / "structure.md").read_text()


def test_the_python_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert "LlamaDecoderLayer" in capsys.readouterr().out


def test_the_tree_names_every_file_and_no_other():
    (tree,) = re.findall(r"```\n(hybrid_engine/ .*?)```", STRUCTURE, re.DOTALL)
    named, folders = set(), [""]
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        first = line.split()[0]
        if first.endswith("/"):
            folders[depth:] = [(folders[depth - 1] if depth else "") + first]
        else:
            named |= {folders[depth - 1] + name for name in line.split() if name.endswith(".py")}
    folders = ("hybrid_engine", "containers", "ops", "recipes")
    present = {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py")}
    present = {path for path in present if path == "hybrid_engine/__init__.py" or not path.endswith("__init__.py")}
    assert named == present
