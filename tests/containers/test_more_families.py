"""Families whose layers combine parts of others: rollouts, adapters and a training step, one lean test of each."""

from typing import Any

import pytest
import torch

from tests.support.family_checks import GREEDY, adapted, build_engine, check_training_step
from tests.support.models import MORE_BUILDERS, build_model, module_logprobs, padded_prompts

ORDER = torch.tensor([4, 2, 0, 5, 1, 3])


def check_rollout(engine: Any, own: torch.nn.Module) -> None:
    """Padded prompts in another order: tokens of the model's own `generate()`, log-probabilities of its forward."""
    assert engine.generator.fallback_reason is None
    input_ids, mask = padded_prompts()
    expected = own.generate(input_ids=input_ids, attention_mask=mask, **GREEDY)
    output = engine.generate(
        input_ids=input_ids[ORDER], attention_mask=mask[ORDER], return_dict_in_generate=True, **GREEDY
    )
    assert torch.equal(output.sequences, expected[ORDER])
    logprobs = module_logprobs(own, expected, mask).float()
    torch.testing.assert_close(output.logprobs, logprobs[ORDER], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", MORE_BUILDERS)
def test_a_rollout_is_the_models_own_and_a_training_step_that_of_a_plain_loop(family):
    check_rollout(build_engine(build_model(family)), build_model(family))
    check_training_step(lambda: build_model(family))


@pytest.mark.parametrize("family", MORE_BUILDERS)
def test_adapters_on_every_linear_reach_the_rollout(family):
    check_rollout(build_engine(adapted(build_model(family))), adapted(build_model(family)))
