"""The options of a recipe, read from its source: importing a recipe takes the seconds that torch and transformers take.

A recipe has a dataclass `Config`, whose docstring is written for those who read `--help`; each field has a type of
`KINDS`, a literal as default, and a string below it that says what it means.
"""

import ast
from dataclasses import dataclass
from importlib import resources
from typing import Any

from hybrid_engine.command.field_meanings import documented_fields

KINDS: dict[str, type] = {"bool": bool, "float": float, "int": int, "str": str, "str | None": str}
"""What a field may be annotated with, and how its value is read from the command line."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One field of a recipe's `Config`."""

    name: str
    """as the field is called, with underscores"""
    kind: type
    default: Any
    meaning: str


@dataclass(frozen=True, kw_only=True)
class RecipeHelp:
    """What `--help` shows of a recipe."""

    text: str
    options: list[Option]


def read_recipe_help(recipe: str) -> RecipeHelp:
    """The docstring and the fields of the `Config` in the module `hybrid_engine.recipes.<recipe>`."""
    source = resources.files("hybrid_engine.recipes").joinpath(f"{recipe}.py").read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    config = classes["Config"]
    options = [_read_option(name, node, meaning) for name, (node, meaning) in documented_fields(config).items()]
    undocumented = {ast.unparse(node.target) for node in config.body if isinstance(node, ast.AnnAssign)}
    undocumented -= {option.name for option in options}
    assert not undocumented, f"{recipe}: say what {undocumented} mean"
    return RecipeHelp(text=ast.get_docstring(config) or "", options=options)


def _read_option(name: str, field: ast.AnnAssign, meaning: str) -> Option:
    assert field.value is not None, f"{name} needs a default"
    kind, default = KINDS[ast.unparse(field.annotation)], ast.literal_eval(field.value)
    assert kind is not bool or default is False, f"{name}: a flag is off unless it is given"
    return Option(name=name, kind=kind, default=default, meaning=meaning)
