"""Models of gated delta nets beyond one of each family: vision classes, switches, and parts that are not known."""

from dataclasses import replace

import pytest
import torch
import transformers as hf

from hybrid_engine.containers import POLICIES, InferenceModel
from hybrid_engine.containers.gated_delta import GatedDeltaNet, GatedDeltaPolicy
from tests.support.family_checks import GREEDY, build_engine
from tests.support.model_families import _DELTA, _GQA
from tests.support.models import build_model, padded_prompts, randomised

VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}


def build_vision():
    text = {**_GQA, **_DELTA, "head_dim": 16}
    return hf.Qwen3_5ForConditionalGeneration(hf.Qwen3_5Config(text_config=text, vision_config=VISION))


def build_olmo(**options):
    return lambda: hf.OlmoHybridForCausalLM(hf.OlmoHybridConfig(**_GQA, **_DELTA, **options))


SWITCHES = {
    "the text part of a vision model": build_vision,
    "rope and positive eigenvalues": build_olmo(linear_allow_neg_eigval=False),
    "one key head of four value heads": lambda: hf.Qwen3_5ForCausalLM(
        hf.Qwen3_5TextConfig(**_GQA, **{**_DELTA, "linear_num_key_heads": 1, "linear_conv_kernel_dim": 2}, head_dim=16)
    ),
}


def present(build):
    try:
        return randomised(build)
    except AttributeError:
        pytest.skip("this release of transformers does not have the family")


@pytest.mark.parametrize("case", SWITCHES)
def test_tokens_are_the_models_own_with_padding(case):
    input_ids, mask = padded_prompts()
    engine = build_engine(present(SWITCHES[case]))
    assert engine.generator.fallback_reason is None
    expected = randomised(SWITCHES[case]).generate(input_ids=input_ids, attention_mask=mask, **GREEDY)
    assert torch.equal(engine.generate(input_ids=input_ids, attention_mask=mask, **GREEDY), expected)


def test_layers_of_two_classes_have_a_policy_each():
    layers = InferenceModel(present(build_olmo())).layers
    assert [layer.policy.layer_class for layer in layers] == [type(layer.module).__name__ for layer in layers]
    assert [isinstance(layer.mixer, GatedDeltaNet) for layer in layers] == [True, False]
    assert [layer.attention_norm is None for layer in layers] == [False, True]


def test_an_unknown_activation_falls_back_by_name():
    model = build_model("qwen3.5")
    model.model.layers[0].linear_attn.activation = "tanh"
    assert "layer 0 linear_attn activates by 'tanh'" in build_engine(model).generator.fallback_reason


@pytest.mark.parametrize(
    ("family", "layer_class", "wrong"),
    [
        ("qwen3.5", "Qwen3_5DecoderLayer", {"inputs": ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")}),
        ("olmo-hybrid", "OlmoHybridLinearAttentionDecoderLayer", {"negative": None}),
    ],
)
def test_a_wrong_field_of_the_mixers_policy_is_found(family, layer_class, wrong, monkeypatch):
    (policy,) = POLICIES[layer_class]
    mixer = policy.mixers["linear_attention"]
    assert isinstance(mixer, GatedDeltaPolicy)
    changed = replace(policy, mixers={"linear_attention": replace(mixer, **wrong)})
    monkeypatch.setitem(POLICIES, layer_class, [changed])
    assert "containers and the model's forward disagree" in build_engine(build_model(family)).generator.fallback_reason


def test_attention_without_its_gate_does_not_fit(monkeypatch):
    (policy,) = POLICIES["Qwen3_5DecoderLayer"]
    monkeypatch.setitem(POLICIES, "Qwen3_5DecoderLayer", [replace(policy, gates_context=False)])
    reason = "layer 1 self_attn.q_proj has 128 outputs; its 4 heads take 64"
    assert reason in build_engine(build_model("qwen3.5")).generator.fallback_reason
