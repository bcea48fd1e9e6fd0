"""The interface between the engine and a module that a plan has split is narrow, and read in one file of the core."""

import ast
import inspect

from torch import nn

from hybrid_engine.zero import split_module
from tests.support.paths import ROOT

MOST_MEMBERS = 10
PROTOCOLS = ("SplitModule", "StagedModule")


def members_of(protocol):
    """Names that a protocol declares itself, attributes and methods."""
    (found,) = ast.parse(inspect.getsource(getattr(split_module, protocol))).body
    attributes = [node.target.id for node in found.body if isinstance(node, ast.AnnAssign)]
    return attributes + [node.name for node in found.body if isinstance(node, ast.FunctionDef)]


def test_the_interface_has_at_most_ten_members():
    members = [name for protocol in PROTOCOLS for name in members_of(protocol)]
    assert len(members) == len(set(members)) <= MOST_MEMBERS, members


def test_the_core_reads_the_members_in_one_file():
    rooms = [path for path in (ROOT / "hybrid_engine").iterdir() if path.is_dir() and path.name != "extensions"]
    files = [file for room in rooms for file in room.rglob("*.py") if file.name != "split_module.py"]
    using = [str(file.relative_to(ROOT)) for file in files if any(name in file.read_text() for name in PROTOCOLS)]
    assert files and using == []


def test_a_module_that_no_plan_has_split_is_one_process_and_one_stage():
    module = nn.Linear(2, 2)
    assert split_module.unit_size_of(module) == split_module.num_stages_of(module) == 1
    assert split_module.original_of(module) is module
    assert split_module.split_axes_of(module) == ((), ())
    assert split_module.stages_of(module, "weight") == {0}
