"""The arrows of the design, between folders and between the rooms of `hybrid_engine/`, read from every file's imports.

Imports for type checkers count too.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.quick

LAYERS = ("ops", "containers", "hybrid_engine", "recipes")
MAPPED = ("ops", "containers", "recipes")
# From the lowest to the highest; a file imports its own room and those below. Modules of the package itself are rooms.
LOWER_ROOMS = ("config", "distributed", "zero", "optim", "checkpoint")
ROOMS = (*LOWER_ROOMS, "generation", "serving", "inference", "engine", "entry", "rlhf")
# The package names its surface, which lies in an extension; it may import whatever it offers.
ABOVE_ALL = ("extensions", "cli", "__init__")
# Metrics and the maths of reinforcement learning need nothing but numbers and the config's dataclasses.
APART = ("metrics", "rl")
# Files that import what stands above them, and which room: each is to be turned round, and none may join them.
UPWARD = {
    "hybrid_engine/__init__.py": "extensions",
}
# Pairs of folders that import each other: to be parted too.
BOTH_WAYS: set[tuple[str, str]] = set()
# The command line stands above the recipes that it starts; it lives in hybrid_engine/ for the sake of its name.
COMMAND_LINE = "hybrid_engine/cli/cli.py"
# ops knows tensors and numbers only; torch.distributed would be a process group.
OPS_MAY_IMPORT = {"torch", "triton", "numpy", *sys.stdlib_module_names}


def imported_names(tree: ast.AST) -> Iterator[str]:
    """The dotted name of everything a file imports; a relative import keeps its leading dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def layer_of(name: str) -> str | None:
    """The layer that a dotted name belongs to, None for other packages."""
    parts = name.split(".")
    if parts[0] != "hybrid_engine":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in MAPPED else "hybrid_engine"


def room_of(name: str) -> str | None:
    """The room of `hybrid_engine/` that a dotted name belongs to, None for others."""
    parts = name.split(".")
    is_ours = parts[0] == "hybrid_engine" and len(parts) > 1 and parts[1] not in MAPPED
    return parts[1] if is_ours and parts[1] in (*ROOMS, *ABOVE_ALL, *APART) else None


def is_against_the_rooms(path: str, target: str) -> bool:
    """Whether the file at `path` must not import a module of the room `target`."""
    room = Path(path).parts[1].removesuffix(".py")
    if target == room:
        return False
    if target == "extensions":
        return room != "cli"
    if room in ABOVE_ALL or target == "config":
        return target == "cli" and room != "__init__"
    if room in APART:
        return True
    return target not in APART and (target in ABOVE_ALL or ROOMS.index(target) > ROOMS.index(room))


def violations(path: str, source: str) -> list[str]:
    """What the imports of the file at `path` (relative to the repository) do that the design forbids."""
    folder = path.split("/")[0]
    found = []
    for name in imported_names(ast.parse(source)):
        top, target = name.split(".")[0], layer_of(name)
        room = room_of(name) if folder == "hybrid_engine" else None
        if top in (*MAPPED, "benchmarks") or (top == "tests" and folder != "tests"):
            found.append(f"{path} imports {name} by the bare name of a folder")
        if folder not in LAYERS:
            continue
        if name.startswith("."):
            found.append(f"{path} imports {name} relatively")
        elif path in UPWARD and UPWARD[path] in (room, target):
            continue
        elif name.startswith("hybrid_engine.cli.cli") and path != COMMAND_LINE:
            found.append(f"{path} imports the command line")
        elif target and path != COMMAND_LINE and LAYERS.index(target) > LAYERS.index(folder):
            found.append(f"{path} imports {name} from the layer above")
        elif room and is_against_the_rooms(path, room):
            found.append(f"{path} imports {name} against the arrows between rooms")
        elif folder == "ops" and not target and (top not in OPS_MAY_IMPORT or name.startswith("torch.distributed")):
            found.append(f"{path} imports {name}, but ops knows tensors and numbers only")
    return found


def test_every_import_points_down():
    paths = [path for folder in (*LAYERS, "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert {path.relative_to(ROOT).parts[0] for path in paths} >= {*LAYERS, "tests"}
    found = [entry for path in paths for entry in violations(path.relative_to(ROOT).as_posix(), path.read_text())]
    assert not found, "\n".join(found)


def folder_of(name: str) -> str | None:
    """The folder of the module or package that a dotted name is of, or is below; None for other packages."""
    parts = name.split(".")
    if parts[0] != "hybrid_engine":
        return None
    parts = parts[1:] if len(parts) > 1 and parts[1] in MAPPED else parts
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        if path.with_suffix(".py").exists():
            return path.parent.relative_to(ROOT).as_posix()
        if (path / "__init__.py").exists():
            return path.relative_to(ROOT).as_posix()
    return None


def test_no_two_folders_import_each_other():
    """A folder is one abstraction: what it needs does not need it."""
    imports = set()
    for path in [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]:
        folder = path.parent.relative_to(ROOT).as_posix()
        names = imported_names(ast.parse(path.read_text()))
        found = [folder_of(name) for name in names if not name.startswith("hybrid_engine.lazy")]  # imports nothing
        imports |= {(folder, other) for other in found if other is not None and other != folder}
    both_ways = {tuple(sorted(pair)) for pair in imports if pair[::-1] in imports}
    assert both_ways == BOTH_WAYS


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ops/norm.py", "from hybrid_engine.containers import policy"),
        ("ops/norm.py", "import hybrid_engine"),
        ("ops/norm.py", "from hybrid_engine import config"),
        ("ops/norm.py", "import torch.distributed as dist"),
        ("ops/norm.py", "from torch import distributed"),
        ("ops/norm.py", "def f():\n    import transformers"),
        ("ops/norm.py", "from .softmax import softmax"),
        ("containers/llama.py", "from hybrid_engine.config import EngineConfig"),
        ("containers/llama.py", "from hybrid_engine import recipes"),
        ("hybrid_engine/rl/estimates.py", "if True:\n    from hybrid_engine.recipes.ppo import main"),
        ("hybrid_engine/engine/zero_engine.py", "from hybrid_engine.cli.cli import main"),
        ("hybrid_engine/zero/sharding.py", "from hybrid_engine.optim.masters import renew_masters"),
        (
            "hybrid_engine/checkpoint/saving.py",
            "if TYPE_CHECKING:\n    from hybrid_engine.engine.zero_engine import ZeroEngine",
        ),
        ("hybrid_engine/zero/init.py", "from hybrid_engine.extensions.deepspeed.utils import DeepSpeedEngine"),
        ("hybrid_engine/rlhf/data/rows.py", "from hybrid_engine.recipes import sft"),
        ("hybrid_engine/metrics/latency.py", "from hybrid_engine.distributed.processes import get_rank"),
        ("hybrid_engine/extensions/deepspeed/utils.py", "from hybrid_engine.cli.cli import parse"),
        ("recipes/ppo.py", "from tests.support.goldens import load_golden"),
        ("recipes/ppo.py", "import ops.norm"),
        ("tests/test_norm.py", "from ops import norm"),
        ("benchmarks/bench_norm.py", "from containers.llama import policy"),
    ],
)
def test_an_import_against_the_arrows_is_found(path, source):
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "ops/norm.py",
            "import math\nimport torch\nfrom torch import Tensor\nfrom hybrid_engine.ops import linears",
        ),
        ("containers/llama.py", "from hybrid_engine.ops import norm\nimport transformers"),
        (
            "hybrid_engine/engine/hybrid_engine.py",
            "from hybrid_engine.containers import policy\nimport torch.distributed",
        ),
        ("hybrid_engine/cli/cli.py", "from hybrid_engine.recipes import ppo"),
        ("hybrid_engine/extensions/deepspeed/utils.py", "from hybrid_engine.entry import initialize"),
        ("hybrid_engine/engine/zero_engine.py", "from hybrid_engine.metrics.observer import Observer"),
        ("hybrid_engine/rl/estimates.py", "from hybrid_engine.config import EngineConfig"),
        ("recipes/ppo.py", "import hybrid_engine\nfrom hybrid_engine.rl.estimates import kl_k1"),
        ("tests/test_norm.py", "from hybrid_engine.cli.cli import main\nfrom hybrid_engine.ops import norm"),
    ],
)
def test_an_import_along_the_arrows_passes(path, source):
    assert violations(path, source) == []
