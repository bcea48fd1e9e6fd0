"""The arrows of the design: recipes -> hybrid_engine -> containers -> ops, read from the imports of every file."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("ops", "containers", "hybrid_engine", "recipes")
MAPPED = ("ops", "containers", "recipes")
# The command line stands above the recipes that it starts; it lives in hybrid_engine/ for the sake of its name.
COMMAND_LINE = "hybrid_engine/command/cli.py"
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


def violations(path: str, source: str) -> list[str]:
    """What the imports of the file at `path` (relative to the repository) do that the design forbids."""
    folder = path.split("/")[0]
    found = []
    for name in imported_names(ast.parse(source)):
        top, target = name.split(".")[0], layer_of(name)
        if top in (*MAPPED, "tests", "benchmarks"):
            found.append(f"{path} imports {name} by the bare name of a folder")
        if folder not in LAYERS:
            continue
        if name.startswith("."):
            found.append(f"{path} imports {name} relatively")
        elif name.startswith("hybrid_engine.command.cli") and path != COMMAND_LINE:
            found.append(f"{path} imports the command line")
        elif target and path != COMMAND_LINE and LAYERS.index(target) > LAYERS.index(folder):
            found.append(f"{path} imports {name} from the layer above")
        elif folder == "ops" and not target and (top not in OPS_MAY_IMPORT or name.startswith("torch.distributed")):
            found.append(f"{path} imports {name}, but ops knows tensors and numbers only")
    return found


def test_every_import_points_down():
    paths = [path for folder in (*LAYERS, "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert {path.relative_to(ROOT).parts[0] for path in paths} >= {*LAYERS, "tests"}
    found = [entry for path in paths for entry in violations(path.relative_to(ROOT).as_posix(), path.read_text())]
    assert not found, "\n".join(found)


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
        ("hybrid_engine/rl/kl.py", "if True:\n    from hybrid_engine.recipes.ppo import main"),
        ("hybrid_engine/engine.py", "from hybrid_engine.command.cli import main"),
        ("recipes/ppo.py", "from tests.goldens import load_golden"),
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
            "import math\nimport torch\nfrom torch import Tensor\nfrom hybrid_engine.ops import activation",
        ),
        ("containers/llama.py", "from hybrid_engine.ops import norm\nimport transformers"),
        ("hybrid_engine/hybrid.py", "from hybrid_engine.containers import policy\nimport torch.distributed"),
        ("hybrid_engine/command/cli.py", "from hybrid_engine.recipes import ppo"),
        ("recipes/ppo.py", "import hybrid_engine\nfrom hybrid_engine.rl.kl import kl_k1"),
        ("tests/test_norm.py", "from hybrid_engine.command.cli import main\nfrom hybrid_engine.ops import norm"),
    ],
)
def test_an_import_along_the_arrows_passes(path, source):
    assert violations(path, source) == []
