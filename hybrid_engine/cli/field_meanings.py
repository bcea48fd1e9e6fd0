"""Documentation of a dataclass's fields: the string below each of them, which Python itself drops."""

import ast
import inspect
import textwrap
from dataclasses import is_dataclass

from hybrid_engine.cli.source_tree import parse_source


def field_meanings(config_class: type) -> dict[str, str]:
    """The string below each field of a dataclass and of its base classes, by field name, read from the source."""
    classes = [base for base in reversed(config_class.__mro__) if is_dataclass(base)]
    return {name: text for base in classes for name, text in _own_meanings(base).items()}


def _own_meanings(config_class: type) -> dict[str, str]:
    definition = parse_source(textwrap.dedent(inspect.getsource(config_class))).body[0]
    assert isinstance(definition, ast.ClassDef), config_class
    return {name: text for name, (_, text) in documented_fields(definition).items()}


def documented_fields(definition: ast.ClassDef) -> dict[str, tuple[ast.AnnAssign, str]]:
    """The fields of a class that have a string below them, by name, each with that string."""
    found = {}
    for node, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            found[node.target.id] = (node, inspect.cleandoc(ast.literal_eval(following.value)))
    return found
