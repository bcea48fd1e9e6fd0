"""deepspeed.utils.safe_get_... and safe_set_...: whole parameters, gradients and optimizer state at every stage."""

import copy

import pytest
import torch

import hybrid_engine as deepspeed
from hybrid_engine.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tests.support.distributed import run_distributed
from tests.support.training_reference import ADAM, engine_config, tiny_llama

pytestmark = pytest.mark.quick

CASES = [(stage, is_bf16) for stage in (0, 1, 2, 3) for is_bf16 in (False, True)]
NAME = "model.layers.1.mlp.up_proj.weight"
TOKENS = torch.arange(24).view(2, 12)


def build(stage, is_bf16, world_size):
    config = engine_config(stage, world_size, train_batch_size=2, gradient_accumulation_steps=1, scheduler=None)
    config |= {"train_micro_batch_size_per_gpu": 2 // world_size, "gradient_clipping": 0.0}
    return deepspeed.initialize(model=tiny_llama(), config={**config, "bf16": {"enabled": is_bf16}})[0]


def visit(rank, world_size):
    """Two steps, reading everything after each backward pass; then a step from values that were set."""
    return {case: _visit(build(*case, world_size), TOKENS[rank::world_size]) for case in CASES}


def _visit(engine, tokens):
    param = dict(engine.module.named_parameters())[NAME]
    seen = {"before": (safe_get_full_fp32_param(param), safe_get_full_grad(param))}
    for step in range(3):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        if step == 2:
            safe_set_full_fp32_param(param, torch.full_like(seen["before"][0], 0.3))
            safe_set_full_grad(param, torch.full_like(seen["before"][0], 0.5))
            for key in ("exp_avg", "exp_avg_sq"):
                safe_set_full_optimizer_state(param, torch.full_like(seen["before"][0], 0.25), key)
        seen["grad", step] = safe_get_full_grad(param)
        engine.step()
        seen["param", step] = safe_get_full_fp32_param(param)
        seen["average", step] = safe_get_full_optimizer_state(param, "exp_avg")
    seen["module"] = param.full_tensor() if hasattr(param, "full_tensor") else param.detach().clone()
    return seen


def accumulate(rank, world_size):
    """The gradient after the first of two micro-batches, its expected value on this process, and that after both."""
    results = {}
    for stage, is_bf16 in CASES:
        config = engine_config(stage, world_size, train_batch_size=2 * world_size, gradient_accumulation_steps=2)
        config |= {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": is_bf16}}
        engine = deepspeed.initialize(model=tiny_llama(), config=config)[0]
        param = engine.module.get_parameter(NAME)
        engine.backward(engine(input_ids=TOKENS[rank:][:1], labels=TOKENS[rank:][:1]).loss)
        first = safe_get_full_grad(param)
        safe_set_full_grad(param, torch.full_like(first, 0.5))
        changed = safe_get_full_grad(param)
        engine.step()
        model = tiny_llama().to(engine.config.dtype)
        rows = [TOKENS[rank:][:1]] if stage < 2 else [TOKENS[r:][:1] for r in range(world_size)]
        (sum(model(input_ids=row, labels=row).loss for row in rows) / len(rows) / 2).backward()
        results[stage, is_bf16] = first, model.get_parameter(NAME).grad.float(), changed
    return results


def test_before_the_boundary_they_give_this_processs_own_gradient_below_stage_2_and_the_mean_above():
    for results in [accumulate(0, 1), *run_distributed(accumulate, 2)]:
        for case, (first, expected, changed) in results.items():
            tolerance = {"rtol": 0.1, "atol": 2e-3} if case[1] else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(first, expected, **tolerance)
            assert first.dtype == torch.float32 and torch.all(changed == 0.5)


@pytest.fixture(scope="module")
def visits():
    return [visit(0, 1), *run_distributed(visit, 2)]


@pytest.fixture(scope="module")
def plain():
    """The same by torch.optim alone: values by step."""
    model = tiny_llama()
    optimizer, param = torch.optim.AdamW(model.parameters(), **ADAM), model.get_parameter(NAME)
    seen = {"start": param.detach().clone()}
    for step in range(2):
        optimizer.zero_grad()
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        seen["grad", step] = param.grad.clone()
        optimizer.step()
        seen["param", step] = param.detach().clone()
        seen["average", step] = optimizer.state[param]["exp_avg"].clone()
    return seen


@pytest.mark.parametrize("case", CASES, ids=str)
def test_they_give_what_a_plain_optimizer_has_at_every_stage_on_one_process_and_on_two(visits, plain, case):
    # In bf16 the gradients themselves are rounded.
    tolerance = {"rtol": 0.1, "atol": 2e-3} if case[1] else {"rtol": 1e-4, "atol": 1e-6}
    for results in visits:
        seen = results[case]
        before, no_grad = seen["before"]
        expected = plain["start"].bfloat16().float() if case[1] else plain["start"]
        assert torch.equal(before, expected) and no_grad is None
        for step in range(2):
            assert seen["grad", step].dtype == seen["param", step].dtype == torch.float32
            torch.testing.assert_close(seen["grad", step], plain["grad", step], **tolerance)
            torch.testing.assert_close(seen["average", step], plain["average", step], **tolerance)
        if not case[1]:
            torch.testing.assert_close(seen["param", 1], plain["param", 1], rtol=1e-4, atol=1e-5)
        assert not torch.equal(seen["param", 0], seen["param", 0].bfloat16().float()), "the master, not the parameter"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_goes_on_from_what_was_set(visits, case):
    param, grad, average, square = (torch.full((1,), value) for value in (0.3, 0.5, 0.25, 0.25))
    beta1, beta2 = ADAM["betas"]
    average, square = beta1 * average + (1 - beta1) * grad, beta2 * square + (1 - beta2) * grad**2
    update = average / (1 - beta1**3) / ((square / (1 - beta2**3)).sqrt() + ADAM["eps"])
    expected = param * (1 - ADAM["lr"] * ADAM["weight_decay"]) - ADAM["lr"] * update
    for results in visits:
        seen = results[case]
        assert seen["grad", 2].unique().tolist() == [0.5]
        torch.testing.assert_close(seen["param", 2], expected.expand_as(seen["param", 2]), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(seen["average", 2], average.expand_as(seen["param", 2]))
        assert torch.equal(seen["module"].float(), seen["param", 2].to(seen["module"].dtype).float())


def test_a_parameter_that_is_not_trained_has_its_value_alone():
    engine = build(0, True, 1)
    frozen = torch.nn.Parameter(torch.ones(3).bfloat16(), requires_grad=False)
    assert safe_get_full_fp32_param(frozen).tolist() == [1, 1, 1] and safe_get_full_grad(frozen) is None
    assert safe_get_full_optimizer_state(frozen, "exp_avg") is None
    trained = engine.module.get_parameter(NAME)
    with pytest.raises(ValueError, match="'exp_avg' is not in the optimizer state of this parameter; it has none"):
        safe_get_full_optimizer_state(trained, "exp_avg")
    with pytest.raises(ValueError, match="the parameter has no gradient"):
        safe_set_full_grad(trained, torch.ones_like(trained))


def test_a_copied_model_knows_of_no_optimizer():
    copied = copy.deepcopy(build(0, True, 1).module)
    assert not any(hasattr(param, "ds_optimizer") for param in copied.parameters())
