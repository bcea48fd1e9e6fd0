"""Groups of parameters that are clipped by a norm of their own."""

import copy

import pytest
import torch
from torch import nn

import hybrid_engine

CONFIG = {"train_batch_size": 1, "gradient_clipping": 0.1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.policy, self.critic = nn.Linear(3, 2), nn.Linear(3, 1)

    def forward(self, x, parts):
        return sum(scale * getattr(self, name)(x).square().sum() for name, scale in parts.items())


def trained(model, groups, parts):
    """The engine after a step, and its weights by name."""
    engine, *_ = hybrid_engine.initialize(model=model, config=CONFIG, model_parameters=groups)
    engine.backward(engine(torch.ones(1, 3), parts))
    engine.step()
    return engine, {name: value.clone() for name, value in engine.module.state_dict().items()}


def groups_of(model):
    return [
        {"params": list(model.policy.parameters())},
        {"params": list(model.critic.parameters()), "clips_apart": True},
    ]


def test_each_is_clipped_as_an_optimizer_of_its_own_would():
    parts = {"policy": 1.0, "critic": 50.0}
    model = Two()
    engine, found = trained(model, groups_of(model), parts)
    norms = []
    for name, scale in parts.items():
        alone = Two()
        single, expected = trained(alone, list(getattr(alone, name).parameters()), {name: scale})
        norms.append(single.get_global_grad_norm())
        for key in (f"{name}.weight", f"{name}.bias"):
            torch.testing.assert_close(found[key], expected[key], rtol=1e-6, atol=1e-7)
    assert engine.optimizer.grad_norms == pytest.approx(norms, rel=1e-6)
    assert engine.get_global_grad_norm() == pytest.approx(torch.tensor(norms).norm().item(), rel=1e-6)


@pytest.mark.parametrize("name", ["policy", "critic"])
def test_a_group_without_gradients_leaves_the_others_as_they_would_be(name):
    model = Two()
    before = copy.deepcopy(model.state_dict())
    _, found = trained(model, groups_of(model), {name: 1.0})
    alone = Two()
    _, expected = trained(alone, list(getattr(alone, name).parameters()), {name: 1.0})
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key] if key.startswith(name) else before[key], rtol=1e-6, atol=1e-7)
