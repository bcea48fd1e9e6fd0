"""The data that every machine has: signatures and docstring summaries of Python's own standard library.

The source files of the running interpreter are parsed with `ast`; no module is imported and nothing is downloaded. One
example is one public function or method: its qualified name and parameters are the prompt, the first paragraph of its
docstring on one line is the summary. Summaries keep their authors' habits: about half of them break PEP 257, which is
what the reward model learns to see and PPO to mend.
"""

import ast
import functools
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid_engine.cli.source_tree import parse_source
from hybrid_engine.rlhf.data.held_out import is_held_out
from hybrid_engine.rlhf.data.rows import CompletionRow, LearnedRow

PROMPT_CHARS = (8, 120)
"""Shortest and longest prompt that is kept, in characters."""
SUMMARY_CHARS = (12, 140)
"""Shortest and longest summary that is kept, in characters."""

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, kw_only=True)
class DocExample:
    """One public function of the standard library."""

    prompt: str
    """`module.Class.method(parameters)` and a newline, where the summary begins."""
    summary: str
    """The docstring's first paragraph on one line."""


@functools.cache
def stdlib_examples(root: Path | None = None) -> tuple[DocExample, ...]:
    """Reads every public, documented function below `root` (default: the running interpreter's standard library).

    The order is that of the sorted file names and of the functions in each file; a prompt or a summary occurs once. The
    files are read at the first call of a process (about two seconds).

    Raises:
        ValueError: `root` holds no usable function, for example where the library is a zip file.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    prompts: set[str] = set()
    summaries: set[str] = set()
    examples = []
    for example in _all_examples(folder):
        if example.prompt not in prompts and example.summary not in summaries and _has_usable_lengths(example):
            examples.append(example)
            prompts.add(example.prompt)
            summaries.add(example.summary)
    if not examples:
        raise ValueError(
            f"the standard library's folder {str(folder)!r} must hold .py files with docstrings and holds none; "
            "use a Python that is installed with its sources"
        )
    return tuple(examples)


def split(examples: Sequence[DocExample]) -> tuple[list[DocExample], list[DocExample]]:
    """Training and held-out examples, each in hash order, so that a prefix is a fair sample of all modules."""
    ordered = sorted(examples, key=lambda example: hashlib.sha256(example.prompt.encode()).digest())
    train = [example for example in ordered if not is_held_out(example.prompt)]
    held_out = [example for example in ordered if is_held_out(example.prompt)]
    return train, held_out


def place_of(example: DocExample) -> str:
    """Where it stands, for errors."""
    return f"the standard library's {example.prompt.strip()}"


def stdlib_row(example: DocExample) -> LearnedRow:
    """The example as a row to learn from."""
    return CompletionRow(prompt=example.prompt, completion=example.summary, place=place_of(example))


def stdlib_rows() -> tuple[list[LearnedRow], list[LearnedRow]]:
    """Training and held-out examples as rows to learn from."""
    train, held_out = split(stdlib_examples())
    return [stdlib_row(example) for example in train], [stdlib_row(example) for example in held_out]


def _all_examples(root: Path) -> Iterator[DocExample]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED_FOLDERS.isdisjoint(parts) and not any(part.startswith("test_") for part in parts):
            names = parts[:-1] if parts[-1] == "__init__" else parts
            yield from _examples_in_file(path, ".".join(names))


def _examples_in_file(path: Path, module: str) -> Iterator[DocExample]:
    try:
        tree = parse_source(path.read_bytes())
    except (SyntaxError, ValueError):  # lib2to3 keeps files in Python 2 and in broken encodings on purpose
        return
    yield from _examples_in_body(tree.body, module)


def _examples_in_body(body: list[ast.stmt], scope: str) -> Iterator[DocExample]:
    for node in body:
        if isinstance(node, ast.ClassDef) and _is_public(node.name):
            yield from _examples_in_body(node.body, f"{scope}.{node.name}")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _is_public(node.name):
            paragraph = (ast.get_docstring(node) or "").strip().split("\n\n")[0]
            prompt = f"{scope}.{node.name}({ast.unparse(node.args)})\n"
            yield DocExample(prompt=prompt, summary=" ".join(paragraph.split()))


def _is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def _has_usable_lengths(example: DocExample) -> bool:
    return (
        PROMPT_CHARS[0] <= len(example.prompt) <= PROMPT_CHARS[1]
        and SUMMARY_CHARS[0] <= len(example.summary) <= SUMMARY_CHARS[1]
        and example.summary.isascii()
        and ">>>" not in example.summary
    )
