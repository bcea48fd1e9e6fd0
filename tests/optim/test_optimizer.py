"""The optimizer shim: groups that are clipped by a norm of their own, and loss scales, which follow DeepSpeed's rules.

Expected scales were worked out by hand from DeepSpeed's loss_scaler.py.
"""

import copy

import pytest
import torch
from torch import nn

import hybrid_engine
from hybrid_engine.optim.optimizer import DynamicLossScaler, StaticLossScaler

pytestmark = pytest.mark.quick

OVERFLOW, FINE = True, False
CONFIG = {"train_batch_size": 1, "gradient_clipping": 0.1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def _scales(scaler, events):
    scales = []
    for overflow in events:
        scaler.update(overflow)
        scales.append(scaler.scale)
    return scales


def test_the_scale_doubles_after_each_window_without_overflow():
    # DeepSpeed counts from the step after the first one, or after an overflow.
    assert _scales(DynamicLossScaler(8, window=3), [FINE] * 8) == [8, 8, 8, 16, 16, 16, 32, 32]
    assert _scales(DynamicLossScaler(8, window=1), [FINE] * 3) == [8, 16, 32]
    events = [FINE, OVERFLOW, FINE, FINE, FINE, FINE, FINE, FINE, FINE]
    assert _scales(DynamicLossScaler(8, window=3, hysteresis=1), events) == [8, 4, 4, 4, 4, 8, 8, 8, 16]


def test_hysteresis_forgives_overflows_before_the_first_halving():
    scaler = DynamicLossScaler(8, window=100, hysteresis=3)
    assert _scales(scaler, [OVERFLOW, FINE, OVERFLOW, OVERFLOW, OVERFLOW]) == [8, 8, 8, 4, 2]


def test_an_overflow_restarts_the_window_and_growth_refills_the_hysteresis():
    scaler = DynamicLossScaler(8, window=2, hysteresis=2)
    events = [OVERFLOW, FINE, FINE, FINE, OVERFLOW, OVERFLOW]
    assert _scales(scaler, events) == [8, 8, 8, 16, 16, 8]


def test_consecutive_hysteresis_is_refilled_by_every_good_step():
    scaler = DynamicLossScaler(8, window=100, hysteresis=2, consecutive_hysteresis=True)
    assert _scales(scaler, [OVERFLOW, FINE, OVERFLOW, FINE, OVERFLOW, OVERFLOW]) == [8, 8, 8, 8, 8, 4]


def test_an_overflow_at_the_smallest_scale_is_an_error_that_says_what_to_do():
    scaler = DynamicLossScaler(2, hysteresis=1, min_scale=1)
    scaler.update(OVERFLOW)
    assert scaler.scale == 1
    with pytest.raises(ValueError, match=r"min_loss_scale=1.*bf16"):
        scaler.update(OVERFLOW)


def test_a_static_scale_never_changes():
    assert _scales(StaticLossScaler(128), [OVERFLOW, FINE, OVERFLOW]) == [128, 128, 128]


def test_a_restored_scaler_goes_on_like_the_one_it_came_from():
    events = [FINE, OVERFLOW, FINE, FINE, OVERFLOW, OVERFLOW, FINE, FINE, FINE, OVERFLOW]
    for cut in range(len(events)):
        whole, first, second = (DynamicLossScaler(64, window=2, hysteresis=2) for _ in range(3))
        expected = _scales(whole, events)
        _scales(first, events[:cut])
        second.load_state_dict(first.state_dict())
        assert _scales(second, events[cut:]) == expected[cut:]


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
