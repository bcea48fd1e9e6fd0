"""The README's example runs as it stands, and the tree of docs/structure.md names every folder."""

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


def test_the_tree_names_every_folder_of_the_product_and_no_other():
    (tree,) = re.findall(r"```\n(hybrid_engine/ .*?)```", STRUCTURE, re.DOTALL)
    named, folders = set(), []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        first = line.split()[0]
        if first.endswith("/"):
            folders[depth:] = [first]
            named.add("".join(folders).removesuffix("/"))
    product = ("hybrid_engine", "containers", "ops", "recipes")
    present = {str(path.parent.relative_to(ROOT)) for top in product for path in (ROOT / top).rglob("*.py")}
    small = {path for path in present if path.startswith(("hybrid_engine/extensions/",)) and path.count("/") > 2}
    assert {path for path in named if path.split("/")[0] in product} - small == present - small
