"""The README's example runs as it stands; docs/structure.md names every folder, and functions that exist."""

import ast
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


NAMED = re.compile(r"`([A-Za-z_][\w.]*)`\s+\(`([\w/]+\.py)`\)")


def defined_names(path) -> set[str]:
    """The functions, classes and methods of a file, methods as `Class.method`."""
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = {node.name for node in tree.body if isinstance(node, kinds)}
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        names |= {f"{owner.name}.{node.name}" for node in owner.body if isinstance(node, kinds)}
    return names


def test_the_lives_name_functions_that_exist():
    lives = NAMED.findall(STRUCTURE[STRUCTURE.index("## The life") :])
    app = ROOT / "hybrid_engine" / "serving" / "web" / "app.py"
    walk = ast.get_docstring(ast.parse(app.read_text())) or ""
    for name, file in NAMED.findall(walk):
        is_near = app.with_name(file).exists()
        lives.append((name, f"serving/web/{file}" if is_near else f"serving/{file}"))
    assert len(lives) > 40
    missing = []
    for name, file in lives:
        path = next((path for path in (ROOT / file, ROOT / "hybrid_engine" / file) if path.exists()), None)
        if path is None or name not in defined_names(path):
            missing.append(f"{name} in {file}")
    assert not missing, "\n".join(missing)
