"""The probe at start-up meets what the config says: windows, kinds of layers, lengths at which rope changes."""

import pytest
import torch
import transformers as hf
from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2DecoderLayer

import hybrid_engine
from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.containers.layer import Attention
from hybrid_engine.generation.model.probe import probe_containers
from tests.support.family_checks import build_engine
from tests.support.model_families import VOCAB
from tests.support.models import module_logprobs, padded_prompts, randomised

_SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "eos_token_id": None,
}
_GQA = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 256}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_LONG = {"short_factor": [1.0] * 6, "long_factor": [1.0 + i for i in range(6)], "original_max_position_embeddings": 100}
_SWITCHES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, **_LONG},
}


def _mistral():
    return hf.MistralForCausalLM(hf.MistralConfig(**_GQA, sliding_window=20, layer_types=_KINDS))


def _gemma3():
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**_GQA, head_dim=16, sliding_window=64, layer_types=_KINDS))


def _gpt_neo():
    kinds = [[["local", "global", "local"], 1]]
    sizes = {"hidden_size": 48, "num_layers": 3, "num_heads": 4, "vocab_size": VOCAB}
    return hf.GPTNeoForCausalLM(hf.GPTNeoConfig(**sizes, attention_types=kinds, window_size=30))


def _switching(kind, policy="Llama"):
    if kind == "dynamic":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**_GQA, rope_parameters=_SWITCHES[kind]))
    longrope = {"rope_parameters": _SWITCHES[kind], "original_max_position_embeddings": 100, "pad_token_id": 0}
    return getattr(hf, f"{policy}ForCausalLM")(getattr(hf, f"{policy}Config")(**_GQA, **longrope))


def _containers(model):
    containers = InferenceModel(model)
    containers.bind()
    return containers


def test_layers_of_mistral_have_the_window_whatever_kind_their_config_names():
    """Ministral's file, loaded as a Mistral: transformers gives the window to all of its layers."""
    input_ids, mask = padded_prompts(width=40)
    engine = build_engine(randomised(_mistral))
    assert engine.generator.fallback_reason is None
    output = engine.generate(
        input_ids, attention_mask=mask, max_new_tokens=12, do_sample=False, return_dict_in_generate=True
    )
    expected = module_logprobs(randomised(_mistral), output.sequences, mask)
    assert (output.logprobs - expected).abs().max() < 1e-4


@pytest.mark.parametrize("build", [_mistral, _gemma3, _gpt_neo])
@pytest.mark.parametrize("window", [None, 15])
def test_a_window_of_one_layer_that_is_not_the_modules_is_found(build, window):
    model = randomised(build)
    containers = _containers(model)
    config = {name: getattr(model.config, name, None) for name in ("sliding_window", "window_size")}
    assert probe_containers(model, containers, lambda: containers.layers).max < 1e-4
    windows = [layer.mixer.softmax_context.window for layer in containers.layers]
    assert {name: getattr(model.config, name, None) for name in config} == config and max(filter(None, windows)) >= 20
    containers.layers[2].mixer.softmax_context.set_window(window if build is _gpt_neo else None)
    with pytest.raises(UnsupportedModelError, match="windows"):
        probe_containers(model, containers, lambda: containers.layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "policy"), [("dynamic", "Llama"), ("longrope", "Llama"), ("longrope", "Phi3")])
def test_a_prompt_past_ropes_switch_is_compared_and_a_response_measured(kind, policy, dtype):
    model = randomised(lambda: _switching(kind, policy)).to(dtype)
    containers = _containers(model)
    inverse = model.model.rotary_emb.inv_freq.clone()
    difference = probe_containers(model, containers, lambda: containers.layers)
    assert difference.past_switch.max > 0.01 and torch.equal(model.model.rotary_emb.inv_freq, inverse)
    assert not containers.angles.tables or all(len(cos) < 80 for cos, _ in containers.angles.tables.values())
    rotary = next(iter(containers.angles.rotaries.values()))
    rotary.scaling *= 1.2
    containers.angles.tables.clear()
    with pytest.raises(UnsupportedModelError):
        probe_containers(model, containers, lambda: containers.layers)


def test_frequencies_that_are_wrong_past_the_switch_alone_are_found(monkeypatch):
    model = randomised(lambda: _switching("longrope"))
    containers = _containers(model)
    rotary = next(iter(containers.angles.rotaries.values()))
    monkeypatch.setattr(rotary, "_computed", lambda length: rotary._buffer("original_inv_freq"))  # never the long ones
    with pytest.raises(UnsupportedModelError, match="a prompt at which rope changes"):
        probe_containers(model, containers, lambda: containers.layers)


@pytest.mark.parametrize("kind", _SWITCHES)
def test_how_far_rollouts_past_the_switch_are_is_what_a_rollout_shows(kind):
    """The measure is taken on a dozen tokens without the hundred before; a rollout over the switch is as far off."""
    model = randomised(lambda: _switching(kind))
    length = 256 if kind == "dynamic" else 100
    engine = build_engine(model, hybrid_engine={"enabled": True, "max_out_tokens": 300})
    said = engine.generator.switch_difference
    assert (
        f"rollouts that grow beyond {length} tokens" in engine.report() and f"{said.max:.2g} at most" in engine.report()
    )
    input_ids, mask = padded_prompts(num_prompts=1, width=length - 6)
    output = engine.generate(
        input_ids, attention_mask=mask, max_new_tokens=12, do_sample=False, return_dict_in_generate=True
    )
    apart = (output.logprobs - module_logprobs(model, output.sequences, mask)).abs()
    assert 0.001 < float(apart.max()) < 10 * said.max


class UnlistedLayer(Starcoder2DecoderLayer):
    """A class that the package cannot know."""


def _without_containers(**options):
    def build():
        model = hf.Starcoder2ForCausalLM(hf.Starcoder2Config(**_GQA, pad_token_id=0, **options))
        for layer in model.model.layers:
            layer.__class__ = UnlistedLayer
        return model

    return build


def test_a_model_without_containers_is_measured_too():
    engine = build_engine(randomised(_without_containers(sliding_window=4)))
    assert engine.generator.fallback_reason and 0 < engine.logprob_difference.max < 1e-4
    assert "log-probabilities, rollout against trainer" in engine.report()


def test_a_cache_that_is_wrong_shows_at_start_up(caplog, monkeypatch):
    """A model whose cached steps forget a position: its own generate() is not what its forward trains."""
    model = randomised(_without_containers(sliding_window=None))
    rotary = type(model.model.rotary_emb)
    forward = rotary.forward

    def shifted(self, x, position_ids):
        return forward(self, x, position_ids + 3 if position_ids.shape[1] == 1 else position_ids)

    monkeypatch.setattr(rotary, "forward", shifted)
    engine = build_engine(model)
    assert engine.logprob_difference.max > 0.01
    assert "the model's own generate() and its forward are up to" in caplog.text


def test_containers_that_follow_kinds_which_the_module_ignores_are_not_used(monkeypatch):
    """As containers once did: only the layers that the config calls sliding have the window."""
    original = Attention._build_ops

    def by_kind(self, policy, config, index):
        original(self, policy, config, index)
        if config.layer_types[index] != "sliding_attention":
            self.softmax_context.set_window(None)

    monkeypatch.setattr(Attention, "_build_ops", by_kind)
    engine = build_engine(randomised(_mistral))
    assert "short windows" in engine.generator.fallback_reason


def _head_in_fp32(model):
    """As TRL's `cast_lm_head_to_fp32` does it."""
    model.lm_head = model.lm_head.float()
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
    return model


def _bf16_qwen3():
    return randomised(lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_GQA, head_dim=16))).bfloat16()


@pytest.mark.parametrize("how", ["attach", "init_inference"])
def test_a_head_in_fp32_on_a_model_in_16_bits_runs_on_containers(how):
    input_ids, mask = padded_prompts()
    model, reference = _head_in_fp32(_bf16_qwen3()), _head_in_fp32(_bf16_qwen3())
    engine = hybrid_engine.attach(model) if how == "attach" else hybrid_engine.init_inference(model)
    assert engine.generator.fallback_reason is None
    generate = model.generate if how == "attach" else engine.generate
    output = generate(input_ids, attention_mask=mask, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    expected = module_logprobs(reference, output.sequences, mask)
    assert (output.logprobs - expected).abs().mean() < 0.03


def test_norms_in_fp32_are_named_and_generate_under_autocast_as_the_model_does():
    """Without autocast the model's own forward does not run."""

    def build():
        model = _bf16_qwen3()
        for name, part in model.named_modules():
            if name.endswith("layernorm"):
                part.float()
        return model

    input_ids, mask = padded_prompts()
    model, options = build(), {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    attached = hybrid_engine.attach(model)
    assert "a forward pass mixes dtypes" in attached.generator.fallback_reason
    assert "float32 (model.layers" in attached.generator.fallback_reason
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.generate(input_ids, **options), build().generate(input_ids, **options))


def test_a_head_in_fp32_is_cast_with_the_inputs_that_its_hook_casts(caplog):
    input_ids, mask = padded_prompts()
    engine = build_engine(_head_in_fp32(_bf16_qwen3()), bf16={"enabled": True})
    assert "lm_head: its weights become bfloat16" in caplog.text
    assert engine.generator.fallback_reason is None
    engine.backward(engine(input_ids=input_ids, labels=input_ids).loss)
    engine.step()
    engine.eval()
    output = engine.generate(
        input_ids, attention_mask=mask, max_new_tokens=9, do_sample=False, return_dict_in_generate=True
    )
    expected = module_logprobs(engine.module, output.sequences, mask)
    assert (output.logprobs - expected).abs().mean() < 0.03


def test_a_hook_that_the_cast_of_all_weights_contradicts_is_named():
    model = _bf16_qwen3()
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
    engine = build_engine(model, bf16={"enabled": True})
    assert "a forward pass mixes dtypes" in engine.generator.fallback_reason
