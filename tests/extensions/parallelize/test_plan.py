"""Graphs of modules, and plans for them: keys, files, edits, differences."""

import json
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hybrid_engine.extensions.parallelize.graph.graph import build_graph
from hybrid_engine.extensions.parallelize.module.parallel_module import check_axes
from hybrid_engine.extensions.parallelize.planning.plan import Plan

pytestmark = pytest.mark.quick


class Block(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied weights, a buffer that is written into, a region without gradients, arguments in a dict."""

    def __init__(self, num_layers=2, hidden=8):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block(hidden) for _ in range(num_layers))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch, scale=1.0):
        self.calls += 1
        x = self.embed(batch["ids"])
        for layer in self.layers:
            x = layer(x)
        with torch.no_grad():
            size = x.abs().mean()
        return F.cross_entropy(self.head(x / size * scale).flatten(0, 1), batch["ids"].flatten())


def sample(length=6):
    return {"batch": {"ids": torch.zeros(4, length, dtype=torch.long)}}


@pytest.fixture(scope="module")
def graph():
    return build_graph(Net(), sample())


def test_a_graph_keys_ops_by_module_path_op_and_ordinal(graph):
    assert graph.ops["layers.0.up:linear:0"].inputs[1:] == ("layers.0.up.weight", "layers.0.up.bias")
    assert graph.aliases == {"head.weight": "embed.weight"}
    assert list(graph.mutations) == ["calls"]
    assert ":cross_entropy_loss:0" in graph.ops
    assert graph.values["layers.1.down:linear:0/0"].shape == (4, 6, 8)


def test_the_module_is_as_it_was(graph):
    module = Net()
    weight = module.embed.weight
    build_graph(module, sample())
    assert module.embed.weight is weight
    assert module.head.weight is weight
    assert module.calls.item() == 0


def test_a_model_on_meta_has_the_same_graph(graph):
    with torch.device("meta"):
        module = Net()
    module.head.weight = module.embed.weight
    assert build_graph(module, sample()).hash == graph.hash


def test_another_shape_of_the_arguments_changes_the_hash_and_not_the_signature(graph):
    longer = build_graph(Net(), sample(length=10))
    assert longer.hash != graph.hash
    assert longer.signature == graph.signature
    plan = Plan(graph=graph, mesh=(2,))
    plan.place("layers.*.up", out="n")
    assert plan.for_graph(longer).splits == plan.splits


def test_a_plan_comes_back_from_its_file(graph, tmp_path):
    plan = Plan(graph=graph, mesh=(2, 2), recompute=("layers.*",), num_micro_batches=4)
    assert plan.place("layers.*.up", out="n") == ["layers.0.up:linear:0", "layers.1.up:linear:0"]
    plan.place("layers.*.down", out="k", axis=1)
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["splits"]["layers.0.up"] == {"linear:0": ["n", None]}
    again = Plan.load(tmp_path / "plan.json", graph)
    assert again == plan
    assert plan.diff(again) == ""
    again.place("layers.0.up", out=None)
    again.num_micro_batches = 8
    assert plan.diff(again) == "num_micro_batches: 4 -> 8\nlayers.0.up:linear:0: n, whole -> whole"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("layers.*.upp", "n"), "nearest are .*layers.0.up"),
        (("layers.*.up", "q"), "out='q' can be split in none"),
        (("layers.*.norm", "n0"), "can be split in none"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused(graph, arguments, match):
    with pytest.raises(ValueError, match=match):
        Plan(graph=graph, mesh=(2,)).place(arguments[0], out=arguments[1])


def test_an_edit_that_does_not_divide_is_refused_and_changes_nothing(graph):
    plan = Plan(graph=graph, mesh=(3,))
    with pytest.raises(ValueError, match=r"layers.0.up:linear:0: sizes {'n': 8} must divide by the mesh \[3\]"):
        plan.place("layers.*.up", out="n")
    assert plan.splits == {}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: c.update(version=0), "has version=0, this is version 1"),
        (lambda c: c.update(extra=1), r"keys \['extra'\] are missing or unknown"),
        (lambda c: c.update(mesh="2"), "mesh='2' must be of type list"),
        (lambda c: c["splits"].update({"layers.0.up": {"linear:0": ["k", "n"]}}), "one entry for each axis"),
        (lambda c: c["splits"].update({"layers.0.up": {"linear:0": ["z"]}}), "cannot be split along 'z'"),
        (lambda c: c["splits"].update({"layers.9": {"linear:0": ["n"]}}), "the model has no such op"),
        (
            lambda c: c["splits"].update({"layers.0.up": ["linear:0"]}),
            r"splits\['layers.0.up'\]=.* must map ops to lists",
        ),
        (lambda c: c["splits"].update({"layers.0.up": {"linear:0": [3]}}), r"splits\['layers.0.up'\]=.* must map ops"),
        (
            lambda c: c["parameters"].update({"head.weight": [16, 8]}),
            "parameter head.weight has shape",
        ),
        (lambda c: c.update(version=True), "has version=True, this is version 1"),
        (lambda c: c.update(stages=["embed"]), "stages=.* must be a list of module paths"),
        (lambda c: c.update(recompute=[3]), "recompute=.* must be a list of globs"),
        (lambda c: c.update(num_micro_batches=True), "num_micro_batches=True must be a number"),
    ],
)
def test_a_wrong_plan_file_is_refused_by_what_is_wrong(graph, tmp_path, change, match):
    content = Plan(graph=graph, mesh=(2,)).to_json()
    change(content)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=match):
        Plan.load(path, graph)


@pytest.mark.parametrize(
    ("stages", "match"),
    [
        ([["embed", "layers.0"], ["layers.1", "layers.7"]], r"stages\[1\] has 'layers.7', which is no module"),
        ([["embed", "layers.0"], ["layers.0", "layers.1"]], "stages 0 and 1 have 'layers.0'; leave it in one"),
    ],
)
def test_stages_of_a_plan_file_name_modules_once_each(graph, stages, match):
    content = Plan(graph=graph, mesh=(1,)).to_json() | {"stages": stages, "num_micro_batches": 2}
    with pytest.raises(ValueError, match=match):
        Plan.from_json(content, graph).check_runs()


def test_a_plan_of_another_model_is_refused_by_what_differs(graph, tmp_path):
    Plan(graph=build_graph(Net(hidden=16), sample()), mesh=(2,)).save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"layers.0.up.weight has shape \[16, 8\] in the plan and \[8, 8\]"):
        Plan.load(tmp_path / "plan.json", graph)


class Branching(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


def test_control_flow_on_data_is_refused_by_its_line():
    with pytest.raises(ValueError, match=r"Branching cannot be traced at .*test_plan.py:\d+"):
        build_graph(Branching(), {"x": torch.ones(2)})


class Positional(nn.Module):
    def forward(self, x, /):
        return x


def test_arguments_by_position_alone_and_unknown_ones_are_refused():
    with pytest.raises(ValueError, match="by position alone"):
        build_graph(Positional(), {"x": torch.ones(2)})
    with pytest.raises(ValueError, match=r"dummy_forward_args=\['y'\] do not fit"):
        build_graph(Branching(), {"y": torch.ones(2)})


def test_an_engine_trains_plans_over_at_most_two_axes():
    for mesh in ((4,), (4, 1), (2, 2)):
        check_axes(Plan(graph=None, mesh=mesh))
    for mesh in ((2, 2, 2), (2, 1, 2)):
        with pytest.raises(
            ValueError, match=re.escape(f"the plan splits over {list(mesh)}, and an engine has at most")
        ):
            check_axes(Plan(graph=None, mesh=mesh))
