"""Reads the options of a recipe from its source, because importing a recipe waits seconds for torch and transformers.

A recipe has a dataclass `Config`, whose docstring is the text of `--help`. Each field has a type in `KINDS`, a literal
default, and a string below it that describes it. `Config` may derive from dataclasses of `hybrid_engine` with such
fields. It may also have a field whose type is such a class: the fields of that class are options like all others, and
the command passes the ones that were given to its `from_options`.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from typing import Any

from hybrid_engine.cli.field_meanings import documented_fields
from hybrid_engine.cli.source_tree import parse_source

KINDS: dict[str, type] = {
    "bool": bool,
    "float": float,
    "int": int,
    "str": str,
    "str | None": str,
    "int | None": int,
    "float | None": float,
    "tuple[str, ...]": str,
    "str | tuple[str, ...] | None": str,
    "tuple[float, ...]": float,
}
"""Annotations that a field may have, and the type of its value, or of each value of a list."""
RECIPES_PACKAGE = "hybrid_engine.recipes"
PACKAGE = "hybrid_engine"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a recipe."""

    name: str
    """The field's name, with underscores."""
    kind: type
    """Type of the value, or of each value of a list."""
    is_list: bool
    default: Any
    meaning: str
    group: str | None = None
    """The field of `Config` that holds this option; None for a field of `Config` itself."""


@dataclass(frozen=True, kw_only=True)
class RecipeHelp:
    """The content of a recipe's `--help`."""

    text: str
    options: list[Option]


def read_recipe_help(recipe: str) -> RecipeHelp:
    """The docstring and the options of the `Config` in the module `hybrid_engine.recipes.<recipe>`."""
    config = _SourceClass(f"{RECIPES_PACKAGE}.{recipe.replace('-', '_')}", "Config")
    return RecipeHelp(text=ast.get_docstring(config.definition) or "", options=list(read_options(config)))


def read_options(source: "_SourceClass") -> Iterator[Option]:
    """The options of a class, with those of its base classes first; a field that is declared again keeps its place.

    A field that is declared again only to change its default need not repeat its description.
    """
    found = {option.name: option for base in source.bases for option in read_options(base)}
    documented = documented_fields(source.definition)
    for node in source.definition.body:
        if not isinstance(node, ast.AnnAssign):
            continue
        name, annotation = ast.unparse(node.target), ast.unparse(node.annotation)
        group = None if annotation in KINDS else source.imported(annotation)
        if group is not None:
            found |= {option.name: replace(option, group=name) for option in read_options(group)}
            continue
        meaning = documented[name][1] if name in documented else found[name].meaning if name in found else None
        assert meaning, f"{source.name}: say what {name} means"
        assert node.value is not None, f"{source.name}: {name} needs a default"
        found[name] = Option(
            name=name,
            kind=KINDS[annotation],
            is_list="tuple" in annotation,
            default=ast.literal_eval(node.value),
            meaning=meaning,
        )
    yield from found.values()


@dataclass(frozen=True)
class _SourceClass:
    """A class in the source of a module of `hybrid_engine`."""

    module: str
    name: str

    @cached_property
    def _tree(self) -> ast.Module:
        # The recipes folder is mapped into the package; importing any other package below it would take seconds.
        root = RECIPES_PACKAGE if self.module.startswith(f"{RECIPES_PACKAGE}.") else PACKAGE
        file = self.module.removeprefix(f"{root}.").replace(".", "/") + ".py"
        path = resources.files(root).joinpath(file)
        return parse_source(path.read_bytes())

    @cached_property
    def definition(self) -> ast.ClassDef:
        return next(node for node in self._tree.body if isinstance(node, ast.ClassDef) and node.name == self.name)

    @property
    def bases(self) -> list["_SourceClass"]:
        # The last base comes first, as in the order of a dataclass's fields.
        return [self.imported(ast.unparse(base)) for base in reversed(self.definition.bases)]

    def imported(self, name: str) -> "_SourceClass":
        """The class that this module calls `name`: its own, or one imported from another module of the package."""
        for node in self._tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return _SourceClass(self.module, name)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return _SourceClass(str(node.module), alias.name)
        raise AssertionError(f"{self.module}: {name} is none of {', '.join(KINDS)} and no class of a recipe module")
