"""The size and the names of the product's files: few enough to open, one name for one thing."""

import ast
from collections import defaultdict
from functools import cache

from tests.properties.test_import_direction import imported_names
from tests.support.paths import ROOT

FOLDERS = ("hybrid_engine", "ops", "containers", "recipes")
THIN = "hybrid_engine/extensions/deepspeed/paths/"
"""DeepSpeed's module paths: one thin file each."""
ONE_FILE_EACH = (
    "recipes/",
    "containers/",
    "ops/",
    "hybrid_engine/serving/parsers/",
    "hybrid_engine/serving/protocols/",
)
MOST_FILES = 240
"""Of the rooms in which a recipe, a family, an op, a form of calls or a protocol has no file of its own."""
SMALL = 70
"""Lines below which a file with one importer is part of that importer."""


@cache
def product() -> dict[str, ast.Module]:
    """The product's files by path."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    named = {path.relative_to(ROOT).as_posix(): path for path in paths}
    return {name: ast.parse(path.read_text()) for name, path in named.items() if not name.startswith(THIN)}


def module_of(path: str) -> str:
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts if parts[0] == "hybrid_engine" else ["hybrid_engine", *parts])


def test_the_product_has_few_files():
    shared = [path for path in product() if not path.startswith(ONE_FILE_EACH)]
    assert 150 < len(shared) <= MOST_FILES


def test_a_class_name_stands_for_one_class():
    places = defaultdict(list)
    for path, tree in product().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    assert len(places) > 500
    repeated = {name: paths for name, paths in places.items() if len(paths) > 1 and name != "Config"}
    assert not repeated


def test_a_small_file_with_one_importer_is_part_of_it():
    importers = defaultdict(set)
    for path, tree in product().items():
        for name in imported_names(tree):
            importers[name].add(path)
    alone = []
    for path in product():
        is_exempt = path.startswith(ONE_FILE_EACH) or path.endswith("__init__.py")
        num_lines = len((ROOT / path).read_text().splitlines())
        name = module_of(path)
        users = set().union(
            *(found for known, found in importers.items() if known == name or known.startswith(f"{name}."))
        )
        if not is_exempt and num_lines < SMALL and len(users - {path}) == 1:
            alone.append(path)
    assert not alone
