"""Examples of the pages: Python compiles and imports what exists, commands have options that exist.

`make docs` runs this file with the build of the site; other tests run some of the examples as they stand.
"""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator

import pytest

from hybrid_engine.cli import cli
from tests.support.paths import ROOT

pytestmark = pytest.mark.quick

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:\.venv/bin/)?hybrid-engine (.*)")


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    """Place and text of every code block in one of the languages."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            if match[1] in languages:
                yield f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}", match[2]


def missing_imports(source: str) -> list[str]:
    """The names that `source` imports from this package and that do not exist, or the error of its syntax."""
    try:
        compile(source, "example", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError as error:
        return [str(error)]
    missing = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            missing += [alias.name for alias in node.names if _is_ours(alias.name) and not _exists(alias.name, None)]
        elif isinstance(node, ast.ImportFrom) and _is_ours(node.module or ""):
            missing += [f"{node.module}.{alias.name}" for alias in node.names if not _exists(node.module, alias.name)]
    return missing


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "hybrid_engine"


def _exists(module: str, name: str | None) -> bool:
    try:
        found = importlib.import_module(module)
        return name in (None, "*") or hasattr(found, name)
    except ModuleNotFoundError:
        return False


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of every `hybrid-engine` command in a block; a command ends before a pipe or a redirection."""
    for line in text.replace("\\\n", " ").splitlines():
        if match := COMMAND.match(line.removeprefix("$ ")):
            words = shlex.split(match[1], comments=True)
            end = next((place for place, word in enumerate(words) if word[0] in "|>&;<"), len(words))
            yield words[:end]


def is_refused(arguments: list[str]) -> bool:
    """Whether the command line does not take the arguments."""
    if not arguments or "..." in arguments or arguments[0] in cli.OTHERS or arguments[0] == cli.PLAN:
        return False
    try:
        cli.read_arguments([word for word in arguments if word != "--help"])
    except SystemExit:
        return True
    return False


def test_python_examples_compile_and_import_what_exists():
    examples = [(place, text) for place, text in blocks("python", "py") if not text.lstrip().startswith(">>>")]
    assert len(examples) > 30
    missing = [f"{place}: {name}" for place, text in examples for name in missing_imports(text)]
    assert not missing, "\n".join(missing)


def test_commands_have_options_that_exist():
    examples = [(place, each) for place, text in blocks("", "bash", "sh") for each in commands(text)]
    assert len(examples) > 15
    refused = [f"{place}: {' '.join(each)}" for place, each in examples if is_refused(each)]
    assert not refused, "\n".join(refused)


def test_wrong_examples_are_found():
    assert missing_imports("from hybrid_engine import initialize, nothing_such") == ["hybrid_engine.nothing_such"]
    assert missing_imports("import hybrid_engine.nowhere") == ["hybrid_engine.nowhere"]
    assert list(commands("hybrid-engine sft \\\n  --steps 2  # two\n")) == [["sft", "--steps", "2"]]
    assert is_refused(["sft", "--no-such-option"])
