"""DeepSpeed's private attributes of the hybrid engine say what the model's own layers and adapters are."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

import hybrid_engine as deepspeed
from tests.containers.test_lora_duck import adapted
from tests.support.models import PAD, build_model, padded_prompts

GREEDY = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": PAD}


def build_engine(model, **options):
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "hybrid_engine": {"enabled": True},
    }
    return deepspeed.initialize(model=model, config=config | options)[0]


def with_peft(targets="all-linear"):
    return get_peft_model(build_model(), LoraConfig(r=3, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM"))


def same(ours, expected):
    """The same objects in the same order."""
    return len(ours) == len(expected) and all(a is b for a, b in zip(ours, expected, strict=True))


def test_layer_params_begin_with_the_norms_and_are_the_layers_own():
    engine = build_engine(build_model())
    layers = engine.module.model.layers
    assert len(engine.layer_params) == len(engine._inference_containers) == len(layers) == 2
    for ours, layer in zip(engine.layer_params, layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        norms = [layer.post_attention_layernorm.weight, None, layer.input_layernorm.weight, None]
        assert same(ours, norms + [linear.weight for linear in linears])


def test_layer_params_of_norms_with_biases():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    engine = build_engine(model)
    for ours, layer in zip(engine.layer_params, engine.module.transformer.h, strict=True):
        assert same(ours[:4], [layer.ln_2.weight, layer.ln_2.bias, layer.ln_1.weight, layer.ln_1.bias])
        assert {id(p) for p in ours} == {id(p) for p in layer.parameters()} and len(ours) == 12


@pytest.mark.parametrize("kind", ["peft", "own"])
def test_parameters_are_split_into_the_layers_and_their_adapters(kind):
    engine = build_engine(with_peft() if kind == "peft" else adapted("llama"))
    model = engine.module.get_base_model() if kind == "peft" else engine.module
    for index, layer in enumerate(model.model.layers):
        params = [p for p in engine.layer_params[index] if p is not None]
        both = params + engine.layer_lora_params[index]
        assert {id(p) for p in both} == {id(p) for p in layer.parameters()}
        assert len(both) == len(list(layer.parameters())), "none twice"
        assert all(not p.requires_grad for p in params if p.dim() == 2)
    assert same(engine.all_lora_params, engine.layer_lora_params[0] + engine.layer_lora_params[1])
    assert same(engine.all_layers_params, list(engine.module.parameters()))


def test_adapters_of_scripts_are_read_off_their_modules():
    engine = build_engine(adapted("llama"))
    for ours, layer in zip(engine.lora_params, engine.module.model.layers, strict=True):
        modules = [module for module in layer.modules() if hasattr(module, "lora_right_weight")]
        assert len(ours) == len(modules) == 7
        for (right, left, scaling), module in zip(ours, modules, strict=True):
            assert right is module.lora_right_weight and left is module.lora_left_weight
            assert scaling == module.lora_scaling


def test_adapters_of_peft_are_the_active_ones():
    engine = build_engine(with_peft(["q_proj", "down_proj"]))
    layer, ours = engine.module.get_base_model().model.layers[1], engine.lora_params[1]
    for (right, left, scaling), module in zip(ours, [layer.self_attn.q_proj, layer.mlp.down_proj], strict=True):
        assert right is module.lora_A["default"].weight and left is module.lora_B["default"].weight
        assert scaling == 2.0
    with engine.module.disable_adapter():
        assert engine.lora_params == [[], []] and engine.all_lora_params == []
    assert len(engine.all_lora_params) == 8


def test_a_model_without_adapters_has_none():
    engine = build_engine(build_model())
    assert engine.lora_params == engine.layer_lora_params == [[], []] and engine.all_lora_params == []


def test_is_lora_fused_follows_the_fusing():
    engine = build_engine(adapted("llama")).eval()
    seen = [engine.is_lora_fused]
    engine.fuse_lora_weight()
    seen.append(engine.is_lora_fused)
    engine.unfuse_lora_weight()
    seen.append(engine.is_lora_fused)
    assert seen == [False, True, False]


def test_the_original_generate_is_the_models_own():
    engine = build_engine(build_model()).eval()
    input_ids, mask = padded_prompts()
    assert engine.module.generate == engine.generate != engine._generate
    own = build_model().generate(input_ids, attention_mask=mask, **GREEDY)
    tokens = engine.latency_stats()["generated_tokens"]
    assert torch.equal(engine._generate(input_ids, attention_mask=mask, **GREEDY), own)
    assert engine.latency_stats()["generated_tokens"] == tokens == 0, "not a rollout of the engine"


def test_a_model_without_containers_has_empty_lists_and_generates():
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4))
    engine = build_engine(model).eval()
    assert engine.generator.fallback_reason is not None
    assert engine._inference_containers == engine.layer_params == engine.lora_params == engine.layer_lora_params == []
    assert not engine.is_lora_fused
    assert engine._generate(torch.ones(1, 3, dtype=torch.int64), **GREEDY).shape == (1, 9)


@pytest.mark.parametrize("stage", [0, 3])
def test_flags_are_the_configs(stage):
    options = {"zero_optimization": {"stage": stage}, "hybrid_engine": {"enabled": True, "pin_parameters": stage == 0}}
    engine = build_engine(build_model(), **options)
    assert engine.Z3_enabled == (stage == 3)
    assert engine.gather_all_layers == (stage == 0)


def test_a_plain_engine_has_none_of_these_names():
    engine = build_engine(build_model(), hybrid_engine={})
    for name in ("layer_params", "_inference_containers", "_generate", "Z3_enabled"):
        with pytest.raises(AttributeError, match=name):
            getattr(engine, name)
