"""The package imports what is used and no more, and any module of it may be imported first."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from importlib.machinery import PathFinder
from itertools import groupby
from pathlib import Path

import pytest

import hybrid_engine
from hybrid_engine.extensions.deepspeed import absent
from tests.support import fresh_python
from tests.support.deepspeed_names import ABSENT, WORKING
from tests.support.paths import ROOT

MAPPED = ("ops", "containers", "recipes")
PATHS = ROOT / "hybrid_engine/extensions/deepspeed/paths"
LARGE = ("peft", "accelerate", "datasets", "scipy.optimize", "torch.distributed.pipelining", "torch.export", "rich")
"""What our modules import of others, once for all processes that try one of ours."""
MOST_MODULES = 150
"""Of the project's modules that an engine which only trains may load."""


def module_files():
    """The file of every module of the package, by its whole name; DeepSpeed's paths are not among them."""
    folders = {"hybrid_engine": "hybrid_engine"} | {folder: f"hybrid_engine.{folder}" for folder in MAPPED}
    for folder, package in folders.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if "paths" not in parts:
                yield ".".join([package, *(part for part in parts if part != "__init__")]), path


FILES = dict(module_files())


def imported_at_once(name):
    """The modules that run before the module's own statements have, its own packages excepted."""
    waiting, found = list(ast.parse(FILES[name].read_text()).body), set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        else:
            waiting += ast.iter_child_nodes(node)
    parts = {".".join(whole.split(".")[:length]) for whole in found for length in range(1, whole.count(".") + 2)}
    return {other for other in parts & FILES.keys() if other != name and not name.startswith(f"{other}.")}


def test_no_module_imports_itself_through_others():
    try:
        order = list(TopologicalSorter({name: imported_at_once(name) for name in FILES}).static_order())
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
    assert len(order) > 250  # so that none is overlooked


def test_a_module_of_each_room_may_be_imported_before_all_others():
    """Each in a process of its own, which has imported nothing of ours; the last by name of its room."""
    rooms = groupby(sorted(FILES), key=lambda name: name.split(".")[1:2])
    modules = [list(names)[-1] for _, names in rooms]
    assert len(modules) > 15
    source = f"""
import importlib, os, sys
for package in {LARGE}:
    importlib.import_module(package)
failed = 0
for module in {modules}:
    child = os.fork()
    if child == 0:
        importlib.import_module(module)
        os._exit(0)
    failed += os.waitpid(child, 0)[1] != 0
sys.exit(failed)
"""
    result = fresh_python.run_python("-c", source)
    assert result.returncode == 0, result.stderr


TRAIN = """
import sys
import hybrid_engine, torch

engine, *_ = hybrid_engine.initialize(
    model=torch.nn.Linear(2, 1), config={"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
)
engine.backward(engine(torch.ones(1, 2)).sum())
engine.step()
print(*(name for name in sys.modules if name.split(".")[0] == "hybrid_engine"))
"""


def test_an_engine_that_only_trains_loads_no_extension_and_few_modules():
    result = fresh_python.run_python("-c", TRAIN)
    modules = result.stdout.split()
    assert "hybrid_engine.engine.zero_engine" in modules, result.stderr
    assert not [name for name in modules if name.startswith(("hybrid_engine.extensions", "hybrid_engine.serving"))]
    assert len(modules) <= MOST_MODULES, sorted(modules)


OF_EXTRAS = (
    "starlette",
    "uvicorn",
    "pydantic",
    "pydantic_core",
    "prometheus_client",
    "llguidance",
    "math_verify",
    "openai",
)
"""Modules of packages that only an extra requires."""


def test_recipes_are_imported_without_the_packages_of_extras():
    recipes = [n for n in FILES if n.startswith("hybrid_engine.recipes.") and not n.endswith((".agent", ".serve"))]
    assert len(recipes) > 6
    source = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({OF_EXTRAS}))
for name in {recipes}:
    importlib.import_module(name)
"""
    result = fresh_python.run_python("-c", source)
    assert result.returncode == 0, result.stderr


def test_importing_the_package_changes_no_finder_and_imports_nothing_else():
    source = """
import sys
finders = list(sys.meta_path), list(sys.path_hooks), list(sys.path)
import hybrid_engine
dir(hybrid_engine)
assert (sys.meta_path, sys.path_hooks, sys.path) == finders
print(*sorted(name for name in sys.modules if name.split(".")[0] in ("hybrid_engine", "torch", "transformers")))
"""
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert result.stdout == "hybrid_engine hybrid_engine.lazy\n", result.stderr


def test_type_checkers_see_the_names_that_the_package_has_and_where_they_are_from():
    stub = ast.parse((ROOT / "hybrid_engine/__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    names = {alias.name: node.module for node in imports for alias in node.names if alias.name == alias.asname}
    assert names == hybrid_engine._MODULE_OF and sorted(names) == hybrid_engine.__all__
    assert {*names, "__version__"} <= {*dir(hybrid_engine)}


def test_names_of_the_top_that_are_absent_are_those_of_the_list():
    assert set(hybrid_engine._ABSENT) == {name for name in absent.NAMES if "." not in name}
    assert not set(hybrid_engine._ABSENT) & set(hybrid_engine.__all__)


def path_of(file):
    """DeepSpeed's path of a thin file."""
    parts = file.relative_to(PATHS).with_suffix("").parts
    below = {"below_zero": "runtime.zero"}.get(parts[0], parts[0].removeprefix("below_"))
    return ".".join([below, *(part for part in parts[1:] if part != "__init__")])


def test_every_absent_module_has_its_file_and_every_such_file_its_reason():
    files = {path_of(file): file.read_text() for file in PATHS.rglob("*.py")}
    assert set(absent.MODULES) <= files.keys()
    says_so = [path for path, text in files.items() if "is absent" in text]
    assert len(says_so) > 100 and all(absent.why_absent(path) for path in says_so)
    assert {*filter(None, {**WORKING, **ABSENT})} - files.keys() <= {"inference.engine", "ops", "zero"}


def test_a_path_of_deepspeed_hides_no_module_of_ours():
    names = {path.stem for path in PATHS.iterdir()}
    assert not names & {name.split(".")[1] for name in FILES if "." in name}
    for room in ("checkpoint", "inference", "ops", "recipes", "zero"):
        below = {path.stem for path in (PATHS / f"below_{room}").iterdir()}
        assert below and not below & {name.split(".")[2] for name in FILES if name.startswith(f"hybrid_engine.{room}.")}


@pytest.mark.parametrize(
    ("old", "arguments", "words"),
    [
        ("command.cli", ["--version"], "hybrid-engine 0."),
        ("command.launcher", ["--help"], "usage: hybrid-engine launch"),
        ("command.config_page", [], "# "),
        ("compat.deepspeed_names", [], ""),
    ],
)
def test_an_old_path_runs_with_a_warning(old, arguments, words):
    result = fresh_python.run_python("-m", f"hybrid_engine.{old}", *arguments)
    assert words in result.stdout
    assert "FutureWarning: this module goes with the next version; use hybrid_engine." in result.stderr


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("recipes.rewards.loading", "rlhf.rewards.loading", "load_rewards"),
        ("recipes.rewards.answers", "rlhf.rewards.scores", "Answers"),
        ("recipes.tasks.small_llama", "rlhf.tasks.corpus", "build_small_llama"),
        ("inference.megatron.loading", "extensions.megatron.loading", "load_megatron_gpt"),
    ],
)
def test_an_old_path_is_imported_with_a_warning(old, new, name):
    code = f"from hybrid_engine.{old} import {name} as old; import hybrid_engine.{new} as new; assert old is new.{name}"
    result = fresh_python.run_python("-c", f"import warnings; warnings.simplefilter('default'); {code}")
    assert result.returncode == 0, result.stderr
    assert f"DeprecationWarning: hybrid_engine.{old} goes with the next version; import hybrid_engine." in result.stderr


def test_the_places_of_deepspeeds_modules_are_folders_of_this_repository():
    folders = [*hybrid_engine.__path__, *hybrid_engine.ops.__path__, *hybrid_engine.zero.__path__]
    assert str(PATHS) in map(str, map(Path, folders)) and str(PATHS / "below_ops") in folders
    assert PathFinder.find_spec("hybrid_engine.ops.adam", hybrid_engine.ops.__path__).origin.startswith(str(PATHS))
