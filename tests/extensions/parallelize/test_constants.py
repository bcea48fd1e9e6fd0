"""Ops that read nothing but constants are computed once, where that is asked for, and give the same results."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_engine import ComputeConfig, build_optimizer, parallelize
from hybrid_engine.extensions.parallelize.graph.graph import build_graph
from hybrid_engine.extensions.parallelize.module.steps import Steps
from hybrid_engine.extensions.parallelize.planning.policies import replicated_plan
from tests.extensions.parallelize.test_lowering import check_plan, expected_step
from tests.support.distributed import leave_process_group
from tests.support.random_splits import random_plan


class Masked(nn.Module):
    """Reads a mask made of nothing, a table that is no buffer, and noise."""

    def __init__(self, has_noise=True):
        super().__init__()
        self.weight, self.has_noise = nn.Parameter(torch.linspace(-1, 1, 8)), has_noise
        self.table = torch.linspace(0, 1, 8)

    def forward(self, x):
        places = torch.arange(x.shape[-1])
        mask = (places[:, None] >= places[None, :]).float() * self.table.sin()
        noise = torch.rand(8).round() if self.has_noise else places.cos()
        return ((x * self.weight) @ mask + noise).square().mean()


class Counting(TorchDispatchMode):
    """Counts the calls of each op."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def four_simulated_ranks():
    leave_process_group()
    dist.init_process_group("fake", rank=0, world_size=4)
    yield
    leave_process_group()


def test_what_depends_on_arguments_weights_or_chance_is_computed_each_time():
    module, x = Masked(), torch.randn(4, 8)
    graph = build_graph(module, {"x": x})
    steps = Steps(graph, replicated_plan(graph, (1,)), None, folds=True)
    names = [graph.ops[key].name for key in steps.constant_ops]
    assert {"arange", "ge", "sin"} <= set(names) and not {"rand", "round", "mean"} & set(names)
    assert Steps(graph, replicated_plan(graph, (1,)), None).constant_ops == []
    held, inputs = dict(module.named_parameters()), {"input:x": x}
    with torch.inference_mode():  # what is kept from here must do for training
        steps.run(held, inputs)
    torch.manual_seed(0)
    with Counting() as counting:
        outputs, _ = steps.run(held, inputs)
    assert "rand" in counting.names and not {"arange", "ge", "sin"} & set(counting.names)
    torch.manual_seed(0)
    assert outputs[0] == module(x)
    outputs[0].backward()
    assert module.weight.grad.abs().sum() > 0


def test_plans_compute_the_same(four_simulated_ranks, monkeypatch):
    module, arguments = Masked(has_noise=False), {"x": torch.randn(4, 8)}
    graph, expected = build_graph(module, arguments), expected_step(module, arguments)
    init = Steps.__init__
    monkeypatch.setattr(Steps, "__init__", lambda *given: init(*given, folds=True))
    for seed in range(5):
        check_plan(graph, random_plan(graph, (2, 2), seed), module, arguments, expected)


def test_training_gives_the_same_weights(tmp_path):
    def run(**changes):
        torch.manual_seed(0)
        config = ComputeConfig(1, 1, use_end2end=True, **changes)
        module = parallelize(Masked(), {"x": torch.randn(4, 8)}, "dp", config, gen_savedir=tmp_path, reuse="override")
        optimizer = build_optimizer(module, torch.optim.SGD, lr=0.1)
        for num_rows in (4, 2, 4):
            module.train_step([torch.randn(num_rows, 8), torch.randn(num_rows, 8)])
            optimizer.step()
        return module.weight

    assert torch.equal(run(), run(constant_folding=True))


class Shown(nn.Module):
    """Gives a view of what it makes of nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        mask = torch.arange(8).cos()
        return (x * self.weight * mask).sum(), mask.view(2, 4)


def test_results_that_are_changed_in_place_do_not_change_what_is_kept(tmp_path):
    config = ComputeConfig(1, 1, constant_folding=True)
    module = parallelize(Shown(), {"x": torch.ones(8)}, "dp", config, gen_savedir=tmp_path, reuse="override")
    expected, mask = module(torch.ones(8))
    mask.mul_(100)
    assert module(torch.ones(8))[0] == expected
