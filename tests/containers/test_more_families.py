"""Families whose layers combine parts of others: rollouts, adapters and a training step, one lean test of each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.family_checks import GREEDY, adapted, build_engine, check_training_step
from tests.support.model_families import FALLBACKS, MORE_BUILDERS
from tests.support.models import build_model, module_logprobs, padded_prompts, randomised

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


def check_fallback(build: Callable[[], PreTrainedModel], part: str) -> None:
    """The model generates by itself, and one line names the part that no policy knows."""
    engine = build_engine(build())
    assert part in engine.generator.fallback_reason and "\n" not in engine.generator.fallback_reason
    input_ids, mask = padded_prompts()
    expected = build().generate(input_ids, attention_mask=mask, **GREEDY)
    assert torch.equal(engine.generate(input_ids, attention_mask=mask, **GREEDY), expected)


@pytest.mark.parametrize("family", FALLBACKS)
def test_a_family_without_a_policy_is_named(family):
    check_fallback(lambda: randomised(FALLBACKS[family]), "no policy for ")


def with_an_unknown_activation(family: str) -> PreTrainedModel:
    model = build_model(family)
    model.config.hidden_act = "spiral"
    return model


def with_an_unknown_rope() -> PreTrainedModel:
    model = build_model("llama")
    model.model.rotary_emb.rope_type = "spiral"
    return model


def with_an_unknown_kind_of_layer() -> PreTrainedModel:
    model = build_model("llama")
    model.config.layer_types = ["full_attention", "spiral"]
    return model


def test_parts_that_no_policy_knows_are_named():
    check_fallback(lambda: with_an_unknown_activation("llama"), "activation 'spiral'; known are silu")
    check_fallback(lambda: with_an_unknown_activation("mixtral"), "activation 'spiral'; known are silu")
    check_fallback(with_an_unknown_rope, "rope type 'spiral'; known are default")
    reason = build_engine(with_an_unknown_kind_of_layer()).generator.fallback_reason
    assert "layer 1 is of kind 'spiral'; known are sliding_attention" in reason  # for which transformers has no cache
