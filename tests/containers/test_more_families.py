"""Families whose layers combine parts of others: rollouts, adapters and a training step, one lean test of each."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from tests.support.family_checks import GREEDY, adapted, build_engine, check_training_step
from tests.support.family_switches import SWITCHES
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


def unknown(path: str) -> Callable[[PreTrainedModel], None]:
    """Gives the attribute at `path` of a model, or the first entry of a list there, an unknown value."""
    *parents, name = path.split(".")

    def change(model: PreTrainedModel) -> None:
        holder = functools.reduce(getattr, parents, model)
        value = getattr(holder, name)
        setattr(holder, name, ["spiral", *value[1:]] if isinstance(value, list) else "spiral")

    return change


UNKNOWN_PARTS = [
    ("mamba2", "backbone.layers.0.mixer.activation", "layer 0 mixer activates by 'spiral'; known are silu"),
    ("nemotron-h", "config.mlp_hidden_act", "activation 'spiral'; known are silu"),
    ("nemotron-h", "config.layers_block_type", "layer 0 is of kind 'spiral'; known are .*linear_attention, mlp, moe"),
    ("nemotron-h-moe", "config.mlp_hidden_act", "activation 'spiral'; known are silu"),
    ("falcon-h1", "config.hidden_act", "activation 'spiral'; known are silu"),
    ("falcon-h1", "model.layers.0.mamba.activation", "layer 0 mamba activates by 'spiral'"),
    ("falcon-h1", "model.rotary_emb.rope_type", "rope type 'spiral'; known are default"),
    ("jamba", "config.hidden_act", "activation 'spiral'; known are silu"),
    ("jamba", "model.layers.0.mamba.activation", "layer 0 mamba activates by 'spiral'"),
    ("kimi-linear", "config.hidden_act", "activation 'spiral'; known are silu"),
    ("kimi-linear", "model.layers.0.self_attn.activation", "layer 0 self_attn activates by 'spiral'"),
    ("kimi-linear", "config.layer_types", "layer 0 is of kind 'spiral'; known are .*linear_attention"),
    ("llama4", "config.hidden_act", "activation 'spiral'; known are silu"),
    ("llama4", "config.layer_types", "layer 0 is of kind 'spiral'; known are .*chunked_attention"),
    ("llama4", "model.rotary_emb.rope_type", "rope type 'spiral'; known are default"),
    ("phimoe", "config.hidden_act", "activation 'spiral'; known are silu"),
    ("phimoe", "model.rotary_emb.rope_type", "rope type 'spiral'; known are default"),
]


@pytest.mark.parametrize(("family", "path", "line"), [case for case in UNKNOWN_PARTS if case[0] in MORE_BUILDERS])
def test_an_unknown_part_of_a_newer_family_is_named(family, path, line):
    model = build_model(family)
    unknown(path)(model)
    with pytest.raises(UnsupportedModelError, match=line) as error:
        InferenceModel(model)
    assert "\n" not in str(error.value)


def test_rope_whose_factors_change_with_the_length_is_named():
    model = randomised(SWITCHES["phimoe: longrope"])
    model.config.rope_parameters["long_mscale"] = 1.5
    with pytest.raises(UnsupportedModelError, match=r"rope with short_mscale=1.2 and long_mscale=1.5, not equal"):
        InferenceModel(model)
