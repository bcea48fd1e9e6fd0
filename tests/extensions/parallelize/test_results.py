"""What a parallel module gives back: its parameters and views of them, containers of any kind, what is no tensor."""

import dataclasses
from collections import namedtuple
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from hybrid_engine import ComputeConfig, Plan, build_optimizer, parallelize
from tests.support.distributed import leave_process_group, run_distributed


@pytest.fixture(scope="module", autouse=True)
def _one_process_alone():
    leave_process_group()


class Showing(nn.Module):
    """Its results lie in its parameters' memory, and are a view of something that is computed."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.down(torch.relu(self.up(x)))
        weight = self.up.weight
        shown = {"whole": weight, "view": weight[:2].t(), "again": weight.view(4, 16), "detached": weight.detach()}
        return y.view(-1), shown


def showing():
    torch.manual_seed(0)
    return Showing()


def loss_of(y, shown):
    """Also changes a result in place, as callers may."""
    y += 1
    return y.square().sum() + sum(part.square().sum() for name, part in shown.items() if name != "detached")


X = torch.linspace(-1, 1, 32).view(4, 8)


def kept_results(rank, world_size, folder):
    """By lowering what was returned, read after the backward pass, and the gradients."""
    found = {}
    for lowering in ("graph", "eager"):
        config = ComputeConfig(1, 2, use_zero=True, lowering=lowering)
        module = parallelize(showing(), {"x": X}, "dp", config, gen_savedir=folder / lowering)
        optimizer = build_optimizer(module, torch.optim.SGD, lr=0.1)
        y, shown = module(X)
        loss_of(y, shown).backward()
        optimizer.sync_shard_grad()
        gradients = {name: p.grad.full_tensor() for name, p in module.named_parameters()}
        optimizer.step()
        module.eval()
        with torch.no_grad():
            after = module(X)[1]["whole"]
        found[lowering] = y.detach(), {name: part.detach() for name, part in shown.items()}, gradients, after
    return found


def test_parameters_that_a_module_returns_are_there_after_the_backward_pass_under_zero(tmp_path):
    module = showing()
    expected_y, expected = module(X)
    (2 * loss_of(expected_y, expected)).backward()  # of two units
    gradients = {name: p.grad for name, p in module.named_parameters()}
    for outcome in run_distributed(kept_results, 2, tmp_path):
        for y, shown, found, after in outcome.values():
            torch.testing.assert_close(y, expected_y.detach())
            torch.testing.assert_close(shown, {name: part.detach() for name, part in expected.items()})
            torch.testing.assert_close(found, gradients)
            torch.testing.assert_close(after, expected["whole"].detach() - 0.1 * gradients["up.weight"])


@dataclasses.dataclass
class Scores:
    of_rows: torch.Tensor
    words: str
    count: int
    nothing: torch.Tensor | None = None


torch.export.register_dataclass(Scores, serialized_type_name="test_results.Scores")


class Named(NamedTuple):
    x: torch.Tensor
    factor: float


Untyped = namedtuple("Untyped", "one other")


class Containers(nn.Module):
    """Containers of all kinds in and out, with numbers and texts beside tensors."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, sample):
        scores, named = sample["scores"], sample["named"]
        hidden = torch.tanh(self.up(scores.of_rows)) * scores.count
        y = self.down(hidden + named.x * named.factor)
        of_both = Scores(y, scores.words, y.shape[0])
        return y.square().sum(), of_both, Untyped(named, [{"is": True, "many": 3}]), None, 2.5


def containers():
    torch.manual_seed(0)
    return Containers()


def filled(rows):
    x = torch.linspace(-1, 1, 8 * rows).view(rows, 8)
    return {"scores": Scores(x, "words", 3), "named": Named(x + 1, 0.5)}


def columns(graph, config):
    """One linear in parts, whose result is whole again."""
    plan = Plan(graph=graph, mesh=(2,))
    plan.place("up", out="n")
    return plan


def given_back(rank, world_size, folder):
    found = []
    stages = {"pas_config": {"pipeline_nmicros": 2}}
    for policy, options in (("data", {}), (columns, {"lowering": "eager"}), ("pp", stages)):
        config = ComputeConfig(2, 2, use_end2end=True, **options)
        arguments = {"sample": filled(4)}
        module = parallelize(containers(), arguments, policy, config, gen_savedir=folder, reuse="override")
        for rows in (4, 6):
            found.append(module.train_step([filled(rows)] * 2)[1])
    return [pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, one) for one in found]


def test_containers_of_any_kind_go_in_and_out_with_what_is_no_tensor(tmp_path):
    module = containers()
    expected = [pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, module(filled(rows))) for rows in (4, 6)]
    for outcome in run_distributed(given_back, 2, tmp_path):
        for number, result in enumerate(outcome):
            assert_same(result, expected[number % 2])


class WithoutNames(Containers):
    """No named tuples and texts, which torch.export does not keep in files."""

    def forward(self, scores):
        return Scores(self.up(scores.of_rows), None, 2), [{"is": True, "many": 3}], None, 2.5


def test_containers_are_those_of_the_module_where_the_graph_is_kept(tmp_path):
    module, config, arguments = WithoutNames(), ComputeConfig(1, 1), {"scores": filled(4)["scores"]}
    for _ in range(2):
        parallel = parallelize(module, arguments, "dp", config, gen_savedir=tmp_path, reuse="graph")
        assert_same(parallel(**arguments), module(**arguments))


def test_texts_among_results_are_refused_where_the_graph_is_kept(tmp_path):
    class Wordy(WithoutNames):
        def forward(self, scores):
            return self.up(scores.of_rows), "words"

    with pytest.raises(
        ValueError, match=r"graph cannot be kept .*'words' is among the results.* pass broadcast_strategy"
    ):
        parallelize(
            Wordy(), {"scores": filled(4)["scores"]}, "dp", ComputeConfig(1, 1), gen_savedir=tmp_path, reuse="graph"
        )


def assert_same(found, expected):
    """Containers, numbers and texts are equal, tensors up to rounding."""
    (leaves, spec), (wanted, wanted_spec) = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    assert spec == wanted_spec
    for one, other in zip(leaves, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        else:
            assert one == other
