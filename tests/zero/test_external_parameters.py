"""zero.register_external_parameter: a parameter in another module's forward pass, at every stage on two processes."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import hybrid_engine as deepspeed
from tests.support.distributed import run_distributed

pytestmark = pytest.mark.torch_versions

INPUTS = torch.linspace(-1, 1, 24).view(4, 6)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return self.inner(x).tanh()


class Model(nn.Module):
    """Uses the first layer's weight in its own forward pass, after and before that layer's."""

    def __init__(self, registers=True):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(), Block()])
        if registers:
            deepspeed.zero.register_external_parameter(self, self.layers[0].inner.weight)
            deepspeed.zero.register_external_parameter(self, self.layers[1].inner.weight)

    def forward(self, x):
        x = linear(x, self.layers[1].inner.weight)
        for layer in self.layers:
            x = layer(x)
        return linear(x, self.layers[0].inner.weight).square().mean()


class Tied(nn.Module):
    """The parameter is no layer's: nothing needs to be registered."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(6, 6)
        self.layers = nn.ModuleList([Block(), Block()])
        deepspeed.zero.register_external_parameter(self.layers[0], self.layers[0].inner.weight)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return linear(x, self.embedding.weight).square().mean()


def train(model, stage, world_size, rank):
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 4 // world_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    for _ in range(3):
        engine.backward(engine(INPUTS[rank::world_size]))
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = [param.data.clone() for param in engine.module.parameters()]
    return weights, len(engine.sharding.layers)


def two_processes(rank, world_size):
    results = {stage: train(Model(), stage, world_size, rank) for stage in (0, 1, 2, 3)}
    results["tied"] = train(Tied(), 3, world_size, rank)
    with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
        built = Model()
    results["built"] = train(built, 3, world_size, rank)
    results["errors"] = [_error_without_registration(stage, world_size, rank) for stage in (0, 1, 2, 3)]
    return results


def _error_without_registration(stage, world_size, rank):
    try:
        train(Model(registers=False), stage, world_size, rank)
    except ValueError as error:
        return str(error)
    return None


def plainly(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(INPUTS).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


@pytest.fixture(scope="module")
def two_ranks():
    return run_distributed(two_processes, 2)


@pytest.mark.parametrize("case", [0, 1, 2, 3, "built"])
def test_a_layers_parameter_that_the_model_uses_too_trains_as_without_sharding(two_ranks, case):
    expected = plainly(Model(registers=False))
    for results in two_ranks:
        weights, num_layers = results[case]
        assert num_layers == 0
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_parameter_outside_the_layers_may_be_used_anywhere_and_the_layers_stay_apart(two_ranks):
    expected = plainly(Tied())
    for results in two_ranks:
        weights, num_layers = results["tied"]
        assert num_layers == 2
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_without_registration_the_error_says_what_to_call_and_no_gradient_is_lost_silently(two_ranks):
    for results in two_ranks:
        for stage, error in enumerate(results["errors"]):
            assert error.startswith("forward():" if stage == 3 else "backward():")
            assert "call zero.register_external_parameter(module, parameter) before initialize()" in error


def test_what_is_no_parameter_or_was_not_registered_is_refused():
    model = Model()
    weight = model.layers[0].inner.weight
    deepspeed.zero.unregister_external_parameter(model, weight)
    with pytest.raises(ValueError, match="the parameter is not registered for this module"):
        deepspeed.zero.unregister_external_parameter(model, weight)
    with pytest.raises(ValueError, match="Tensor is no parameter"):
        deepspeed.zero.register_external_parameter(model, torch.ones(2))
