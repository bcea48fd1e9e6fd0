"""The private names of FSDP2 that are used: in one file alone, and there in this release of torch.

`make versions` runs this with every release that is allowed, so that the one which takes a name away is named here.
"""

import ast
import importlib
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from hybrid_engine.zero import fsdp2_private
from tests.support.distributed import free_port, leave_process_group
from tests.support.paths import ROOT

pytestmark = pytest.mark.torch_versions

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
ROW = re.compile(r"^\| (`.*?`.*?) +\| (.*?) +\| 2\.(\d+) to 2\.(\d+)", re.MULTILINE)


def rows_of_the_table():
    """`(name, of what, last minor version of torch)` of each private name that the file's table has."""
    for names, owner, _, last in ROW.findall(fsdp2_private.__doc__):
        for name in re.findall(r"`([^`]+)`", re.sub(r"\(and .*?\)", "", names)):
            for one in [name.replace("{save,load}", kind) for kind in ("save", "load")] if "{" in name else [name]:
                yield one.removesuffix("()"), owner, int(last)


ROWS = list(rows_of_the_table())


@pytest.fixture(scope="module")
def owners():
    """FSDP2's own objects after a forward and a backward pass, by the words of the table."""
    leave_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    model(torch.ones(1, 4)).sum().backward()
    state = model._get_fsdp_state()
    group = state._fsdp_param_group
    yield {
        "FSDPModule": model,
        "its state": state,
        "a parameter group": group,
        "a parameter": group.fsdp_params[0],
        "the package": torch.distributed.fsdp._fully_shard,
        "torch.distributed": torch.distributed,
        "its contract": importlib.import_module("torch.distributed._composable.contract"),
    }
    dist.destroy_process_group()


def test_the_table_was_read():
    assert len(ROWS) > 25 and {owner for _, owner, _ in ROWS} == {
        "FSDPModule",
        "its state",
        "a parameter group",
        "a parameter",
        "the package",
        "torch.distributed",
        "its contract",
    }


@pytest.mark.parametrize(("name", "owner", "last"), ROWS, ids=[f"{owner}: {name}" for name, owner, _ in ROWS])
def test_this_torch_has_the_name(owners, name, owner, last):
    found = owners[owner]
    for part in name.split("."):
        if not hasattr(found, part) and (2, last) < VERSION:
            return  # as the table says
        assert hasattr(found, part), f"torch {torch.__version__} changed {owner}: it has no {name}"
        found = getattr(found, part)


def test_no_other_file_uses_them():
    private = {name.split(".")[-1] for name, *_ in ROWS if name.split(".")[-1].startswith("_")}
    private -= {"_training_state"}  # a name that others have too
    found = []
    for path in (
        path for folder in ("hybrid_engine", "containers", "ops", "recipes") for path in (ROOT / folder).rglob("*.py")
    ):
        if path.name == "fsdp2_private.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in private:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.attr}")
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed.fsdp._"):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.module}")
    assert not found
