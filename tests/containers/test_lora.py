"""LoRA reaches the rollouts fused, and leaves the base weights bit-identical."""

import peft
import pytest
import torch
from peft import LoraConfig

import hybrid_engine
from hybrid_engine.generation import memory
from hybrid_engine.generation.core import GenerateCall
from hybrid_engine.generation.rollout.preparing import prepare
from tests.support.models import PAD, build_model, padded_prompts

GREEDY = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": PAD, "eos_token_id": None}
TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "llama-biases-llama3-rope": "all-linear",
    "qwen3-qk-norm": ["k_proj", "o_proj", "gate_proj", "up_proj", "lm_head"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "opt": ["q_proj", "out_proj", "fc1", "fc2"],
}
VARIANTS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "bias": {"lora_bias": True},
}


def adapt(model, targets, seed=0, **options):
    """A peft model whose adapters do something: B is random instead of zero."""
    config = LoraConfig(r=4, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(model, config)
    randomise(model, seed)
    return model.eval()


def randomise(model, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)


def build_engine(model, **config):
    engine, *_ = hybrid_engine.initialize(
        model=model,
        config={
            "train_batch_size": 6,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "hybrid_engine": {"enabled": True},
        }
        | config,
    )
    return engine.eval()


def generate(model, **options):
    input_ids, mask = padded_prompts()
    return model.generate(input_ids=input_ids, attention_mask=mask, **(GREEDY | options))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", TARGETS)
def test_rollouts_equal_pefts_own_and_leave_every_weight_as_it_was(family, variant):
    if variant == "bias" and family in ("llama", "qwen3-qk-norm"):
        pytest.skip("peft adds a LoRA bias only to linears that have a bias")
    expected = generate(adapt(build_model(family), TARGETS[family], **VARIANTS[variant]))
    assert not torch.equal(expected, generate(build_model(family))), "the adapters change the answer"
    engine = build_engine(adapt(build_model(family), TARGETS[family], **VARIANTS[variant]))
    assert engine.generator.fallback_reason is None
    before = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    output = generate(engine, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    for name, tensor in engine.module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_several_adapters_are_fused_together():
    def two_adapters():
        model = adapt(build_model(), TARGETS["llama"])
        model.add_adapter("second", LoraConfig(r=2, lora_alpha=8, target_modules=["k_proj", "v_proj"]))
        randomise(model, 1)
        model.base_model.set_adapter(["default", "second"])
        return model.eval()

    first_only = generate(adapt(build_model(), TARGETS["llama"]))
    expected = generate(two_adapters())
    assert not torch.equal(expected, first_only)
    engine = build_engine(two_adapters())
    assert torch.equal(generate(engine), expected)
    engine.module.base_model.set_adapter("second")
    model = two_adapters()
    model.base_model.set_adapter("second")
    assert torch.equal(generate(engine), generate(model))


def test_disable_adapter_gives_the_reference_policy():
    engine = build_engine(adapt(build_model(), TARGETS["llama"]))
    adapted = generate(engine)
    with engine.module.disable_adapter():
        assert torch.equal(generate(engine), generate(build_model()))
    assert torch.equal(generate(engine), adapted)


def test_training_moves_the_adapters_only_and_the_next_rollout_sees_it():
    input_ids, mask = padded_prompts()
    engine = build_engine(adapt(build_model(), TARGETS["llama"]))
    before = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    generate(engine)
    engine.train()
    engine.backward(engine(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss)
    engine.step()
    for name, tensor in engine.module.state_dict().items():
        assert torch.equal(tensor, before[name]) == ("lora_" not in name), name
    trained = adapt(build_model(), TARGETS["llama"])
    trained.load_state_dict(engine.module.state_dict())
    engine.eval()
    assert torch.equal(generate(engine), generate(trained))


def test_merged_adapters_are_not_added_twice():
    engine = build_engine(adapt(build_model(), TARGETS["llama"]))
    expected = generate(engine)
    engine.module.merge_adapter()
    assert torch.equal(generate(engine), expected)
    engine.module.unmerge_adapter()


def test_fusing_by_hand_and_unfusing_never_writes_to_the_base():
    engine = build_engine(adapt(build_model(), TARGETS["llama"]))
    layer = engine.module.base_model.model.model.layers[0].self_attn.q_proj
    base = layer.base_layer.weight.detach().clone()
    linear = next(linear for linear in engine.convert_to_linear_transposed() if "q_proj" in linear.name)
    engine.fuse_lora_weight()
    assert linear.is_fused
    expected = base + layer.get_delta_weight("default").detach()
    torch.testing.assert_close(linear.pair[0].t(), expected, atol=1e-6, rtol=1e-6)
    engine.unfuse_lora_weight()
    assert not linear.is_fused
    assert linear.pair[0].data_ptr() == layer.base_layer.weight.data_ptr()
    assert torch.equal(layer.base_layer.weight, base)


def test_a_variant_the_containers_do_not_know_falls_back():
    expected = generate(adapt(build_model(), ["q_proj"], use_dora=True))
    engine = build_engine(adapt(build_model(), ["q_proj"], use_dora=True))
    assert "Dora" in engine.generator.fallback_reason
    assert torch.equal(generate(engine), expected)


@pytest.mark.parametrize(
    "config",
    [
        peft.AdaLoraConfig(init_r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", total_step=10),
        peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        peft.LoHaConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        LoraConfig(r=2, target_modules=["embed_tokens"], task_type="CAUSAL_LM"),
    ],
    ids=lambda config: type(config).__name__,
)
def test_adapters_the_containers_do_not_know_fall_back(config):
    torch.manual_seed(0)
    model = peft.get_peft_model(build_model(), config).eval()
    expected = generate(model)
    engine = build_engine(model)
    assert engine.generator.fallback_reason
    assert torch.equal(generate(engine), expected)


def test_merged_and_disabled_adapters_are_refused_as_nobody_can_take_them_out():
    engine = build_engine(adapt(build_model(), TARGETS["llama"]))
    engine.module.merge_adapter()
    with engine.module.disable_adapter(), pytest.raises(ValueError, match="call unmerge_adapter"):
        generate(engine)
    engine.module.unmerge_adapter()
    assert generate(engine).shape == (6, 19)


def test_sixteen_bit_fusing_rounds_once():
    engine = build_engine(adapt(build_model(), TARGETS["llama"]), bf16={"enabled": True})
    layer = engine.module.base_model.model.model.layers[0].self_attn.q_proj
    linear = next(linear for linear in engine.convert_to_linear_transposed() if "q_proj" in linear.name)
    engine.fuse_lora_weight()
    a, b = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
    exact = layer.base_layer.weight.float() + layer.scaling["default"] * (b @ a)
    assert linear.pair[0].dtype == torch.bfloat16
    torch.testing.assert_close(linear.pair[0].t(), exact.bfloat16(), atol=0, rtol=2**-8)
    engine.unfuse_lora_weight()


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_a_rollout_leaves_room_for_the_fused_adapters(family, monkeypatch):
    targets = {"target_modules": "all-linear"} if family != "mixtral" else {
        "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"],
    }  # fmt: skip
    model = peft.get_peft_model(build_model(family), LoraConfig(r=4, **targets))
    engine = build_engine(model)
    containers = engine.generator.model
    containers.bind()
    expected = containers.fuse_lora()
    containers.unfuse_lora()
    assert containers.buffer_bytes() == expected > 0
    assert 0 < containers.buffer_bytes(is_streamed=True) < expected

    block = containers.bytes_per_block(16)
    usable = expected + 3 * block
    monkeypatch.setattr(memory, "usable_memory_bytes", lambda device: usable)
    input_ids, mask = padded_prompts()
    options = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": PAD}
    call = GenerateCall(input_ids=input_ids, attention_mask=mask, options=options)
    plan = prepare(engine.generator, call).plan
    taken = plan.num_blocks * containers.bytes_per_block(plan.block_size)
    assert taken + expected <= usable
