"""Objects of a parallelised class run as the module that each was made from, in any mode, also from a kept plan."""

import itertools

import pytest
import torch
from torch import nn

from hybrid_engine import ComputeConfig, parallelize
from tests.support.distributed import leave_process_group, run_distributed

X = torch.linspace(-1, 1, 32).view(4, 8)


@pytest.fixture(scope="module", autouse=True)
def _one_process_alone():
    leave_process_group()


class Net(nn.Module):
    """What it computes depends on its mode and on a number that a part has."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)
        self.down.scale = scale

    def forward(self, x):
        return self.down(self.dropout(torch.relu(self.up(x)))) * self.down.scale


def net(scale=1.0, mode=True):
    torch.manual_seed(0)
    return Net(scale).train(mode)


def class_of(folder, build, **options):
    return parallelize(Net, {"x": X}, "dp", ComputeConfig(1, 1), gen_savedir=folder, module_fn=build, **options)


def result(module):
    torch.manual_seed(1)
    return module(X).detach()


def in_both_modes(rank, world_size, folder):
    """Results as it is made, in training, in evaluation, in training again."""
    module = class_of(folder, lambda: net(mode=False))()
    return [result(module), *(result(module.train(mode)) for mode in (True, False, True))]


def test_a_class_in_evaluation_follows_its_modes_also_in_a_process_that_reuses_the_plan(tmp_path):
    module = net(mode=False)
    expected = [result(module), *(result(module.train(mode)) for mode in (True, False, True))]
    for _ in range(2):
        torch.testing.assert_close(run_distributed(in_both_modes, 1, tmp_path)[0], expected)


@pytest.mark.parametrize("later", [net(2.0), net(mode=False)], ids=["another number", "another mode"])
def test_an_object_runs_as_what_the_factory_gave_for_it_and_not_for_the_trace(tmp_path, later):
    given = itertools.chain([net()], itertools.repeat(later))
    module = class_of(tmp_path, lambda: next(given))()
    torch.testing.assert_close(result(module), result(later))


def test_an_object_that_is_made_under_autocast_runs_under_it(tmp_path):
    made = class_of(tmp_path, net)
    with torch.autocast("cpu", torch.bfloat16):
        assert result(made()).dtype == result(net()).dtype == torch.bfloat16


def test_a_kept_graph_is_for_the_autocast_that_it_was_traced_under(tmp_path):
    def results():
        return result(parallelize(net(), {"x": X}, "dp", ComputeConfig(1, 1), gen_savedir=tmp_path, reuse="graph"))

    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(results(), result(net()))
    torch.testing.assert_close(results(), result(net()))
