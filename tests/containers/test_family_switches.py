"""Every switch of a family's config: containers compute it, or fall back in the open."""

import pytest
import torch

from tests.support.family_checks import GREEDY, build_engine, check_lora, check_rollout, check_training_step
from tests.support.family_switches import FALLING_BACK, SWITCHES
from tests.support.models import padded_prompts, randomised


@pytest.mark.parametrize("name", SWITCHES)
def test_each_row_has_the_tokens_and_logprobs_of_the_row_alone(name):
    check_rollout(lambda: randomised(SWITCHES[name]))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("name", SWITCHES)
def test_adapters_on_every_linear_reach_the_rollout(name):
    check_lora(lambda: randomised(SWITCHES[name]))


@pytest.mark.parametrize("name", [name for name in SWITCHES if "vision" not in name])  # it wants image masks to train
def test_a_training_step_moves_every_parameter_as_without_the_engine(name):
    check_training_step(lambda: randomised(SWITCHES[name]))


@pytest.mark.parametrize("name", FALLING_BACK)
def test_what_containers_do_not_compute_the_model_generates_itself(name):
    input_ids, mask = padded_prompts()
    engine = build_engine(randomised(FALLING_BACK[name]))
    assert engine.generator.fallback_reason
    expected = randomised(FALLING_BACK[name]).generate(input_ids, attention_mask=mask, **GREEDY)
    assert torch.equal(engine.generate(input_ids, attention_mask=mask, **GREEDY), expected)
