"""DeepSpeed's optimizers against their formulas, written out in fp64."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_engine.ops.adam import DeepSpeedCPUAdam, FusedAdam
from hybrid_engine.ops.lamb import FusedLamb
from hybrid_engine.ops.lion import DeepSpeedCPULion, FusedLion

pytestmark = pytest.mark.quick

STEPS = 5
LR, EPS, DECAY = 1e-2, 1e-6, 0.1


def run(build, formula):
    """Parameters after STEPS steps of the optimizer and of the formula, on the same random gradients."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in [(3, 5), (7,), (1,)]]
    expected = [p.detach().double() for p in params]
    memory = [{"m": torch.zeros_like(p), "v": torch.zeros_like(p)} for p in expected]
    optimizer = build(params)
    for step in range(1, STEPS + 1):
        for index, param in enumerate(params):
            param.grad = torch.randn_like(param)
            expected[index] = formula(expected[index], param.grad.double(), memory[index], step)
        optimizer.step()
    for param, value in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach().double(), value, rtol=1e-6, atol=1e-6)


def moments(g, memory, beta1=0.9, beta2=0.99):
    memory["m"] = beta1 * memory["m"] + (1 - beta1) * g
    memory["v"] = beta2 * memory["v"] + (1 - beta2) * g * g
    return memory["m"], memory["v"]


def adam(p, g, memory, step, *, decoupled=True, corrects=True):
    if not decoupled:
        g = g + DECAY * p
    m, v = moments(g, memory)
    if corrects:
        m, v = m / (1 - 0.9**step), v / (1 - 0.99**step)
    update = m / (v.sqrt() + EPS)
    return p - LR * (update + (DECAY * p if decoupled else 0))


ADAM = {"lr": LR, "betas": (0.9, 0.99), "eps": EPS, "weight_decay": DECAY}


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
def test_both_adams_are_adam_or_adamw_with_or_without_bias_correction(decoupled, corrects):
    def formula(*args):
        return adam(*args, decoupled=decoupled, corrects=corrects)

    run(lambda params: FusedAdam(params, adam_w_mode=decoupled, bias_correction=corrects, **ADAM), formula)
    run(lambda params: DeepSpeedCPUAdam(params, adamw_mode=decoupled, bias_correction=corrects, **ADAM), formula)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("corrects", [True, False])
def test_lamb_rescales_adams_direction_by_the_ratio_of_norms_within_its_bounds(corrects, inside):
    bounds = {"min_coeff": 0.3, "max_coeff": 1.1}

    def formula(p, g, memory, step):
        m, v = moments(g, memory)
        if corrects:
            m, v = m / (1 - 0.9**step), v / (1 - 0.99**step)
        update = m / ((v + EPS).sqrt() if inside else v.sqrt() + EPS) + DECAY * p
        ratio = math.sqrt((p * p).sum()) / math.sqrt((update * update).sum())
        return p - LR * min(max(ratio, 0.3), 1.1) * update

    run(lambda params: FusedLamb(params, bias_correction=corrects, eps_inside_sqrt=inside, **bounds, **ADAM), formula)


def test_lamb_takes_the_plain_step_for_weights_of_zero():
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    FusedLamb([param], lr=0.5, eps=0.0).step()
    torch.testing.assert_close(param.detach(), torch.full((3,), -0.5))


def lion(p, g, memory, step):
    direction = torch.sign(0.9 * memory["m"] + 0.1 * g)
    memory["m"] = 0.99 * memory["m"] + 0.01 * g
    return p - LR * (direction + DECAY * p)


def test_lion_steps_by_the_sign_of_an_interpolated_momentum():
    run(lambda params: FusedLion(params, lr=LR, betas=(0.9, 0.99), weight_decay=DECAY), lion)
    arguments = {"lr": LR, "betas": (0.9, 0.99), "weight_decay": DECAY, "fp32_optimizer_states": True}
    run(lambda params: DeepSpeedCPULion(model_params=params, **arguments), lion)


class Operations(TorchDispatchMode):
    """Names of torch's operations that run inside."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.add(operation.name())
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [FusedAdam, DeepSpeedCPUAdam])
@pytest.mark.parametrize(("decoupled", "kernel"), [(True, "aten::_fused_adamw_"), (False, "aten::_fused_adam_")])
def test_both_adams_run_torchs_fused_implementation(kind, decoupled, kernel):
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = kind([param], **{"adam_w_mode" if kind is FusedAdam else "adamw_mode": decoupled})
    with Operations() as operations:
        optimizer.step()
    assert kernel in operations.names and "aten::addcmul_" not in operations.names


def test_arguments_may_be_given_by_deepspeeds_positions():
    betas = (0.9, 0.99)

    def plain_adam(*args):
        return adam(*args, decoupled=False, corrects=False)

    def lamb(p, g, memory, step):
        m, v = moments(g, memory)
        update = m / (v + EPS).sqrt() + DECAY * p
        ratio = (p.norm() / update.norm()).clamp(0.3, 1.1)
        return p - LR * ratio * update

    run(lambda params: FusedAdam(params, LR, False, betas, EPS, False, DECAY, False, True), plain_adam)
    run(lambda params: DeepSpeedCPUAdam(params, LR, False, betas, EPS, DECAY, False, False, True), plain_adam)
    run(lambda params: FusedLamb(params, LR, False, betas, EPS, True, DECAY, 0.0, 1.1, 0.3, False), lamb)
    run(lambda params: FusedLion(params, LR, betas, DECAY, True), lion)
    run(lambda params: DeepSpeedCPULion(params, LR, betas, DECAY, True), lion)


def test_groups_have_their_own_rates_and_decays_as_scripts_write_them():
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": params[:1], "weight_decay": 0.5, "lr": 0.1}, {"params": params[1:], "weight_decay": 0.0}]
    optimizer = FusedAdam(groups, lr=0.2, betas=(0.9, 0.95))
    for param in params:
        param.grad = torch.ones(2)
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), torch.full((2,), 1 - 0.1 - 0.1 * 0.5))
    torch.testing.assert_close(params[1].detach(), torch.full((2,), 1 - 0.2))


def test_amsgrad_is_refused_by_those_that_lack_it():
    params = [nn.Parameter(torch.ones(2))]
    for kind in (FusedAdam, DeepSpeedCPUAdam, FusedLamb):
        with pytest.raises(ValueError, match="amsgrad=True is not supported"):
            kind(params, amsgrad=True)
