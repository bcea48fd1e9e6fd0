"""The mixture-of-experts block on views: transformers' own numbers, LoRA fused exactly, misfits refused."""

from dataclasses import replace

import peft
import pytest
import torch

from hybrid_engine.containers.moe import MoEBlock
from hybrid_engine.containers.policy import UnsupportedModelError
from tests.support.models_moe import FAMILIES, build_block, run_block

pytestmark = pytest.mark.quick

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ADAPTERS = {  # family, what peft adapts
    "mixtral experts": ("mixtral", {"target_parameters": EXPERTS}),
    "qwen2-moe experts and router": ("qwen2-moe", {"target_parameters": [*EXPERTS, "gate.weight"]}),
    "qwen2-moe shared expert": ("qwen2-moe", {"target_modules": ["up_proj", "down_proj", "shared_expert_gate"]}),
    "qwen3-moe one of the experts' weights": ("qwen3-moe", {"target_parameters": EXPERTS[1:], "use_rslora": True}),
    "deepseek-v3 router, which has a bias": ("deepseek-v3", {"target_parameters": ["gate.weight"], "r": 2}),
    "gpt-oss experts and router": ("gpt-oss", {"target_parameters": [*EXPERTS, "router.weight"]}),
}


def bound(layer, config, policy):
    block = MoEBlock(policy, layer, config, "layer 0")
    block.bind()
    return block


def error(actual, expected):
    return float((actual.double() - expected.double()).abs().max())


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("num_tokens", [1, 3, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_block_equals_transformers_own(family, num_tokens, implementation):
    layer, config, policy = build_block(family, implementation)
    hidden = torch.randn(num_tokens, config.hidden_size)
    expected = run_block(layer, hidden)
    assert error(bound(layer, config, policy).forward(hidden), expected) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_block_in_sixteen_bits_is_as_near_to_fp64_as_the_module(family, dtype):
    layer, config, policy = build_block(family)
    layer = layer.to(dtype)
    hidden = torch.randn(64, config.hidden_size).to(dtype)
    module, block = run_block(layer, hidden), bound(layer, config, policy).forward(hidden)
    exact = run_block(layer.double(), hidden.double())
    # A token whose experts differ in 16 bits differs wholly: such tokens show nothing about the block.
    same_experts = (module.double() - exact).abs().amax(1) < 0.1 * exact.abs().max()
    assert same_experts.sum() > 48
    assert block.dtype == dtype
    assert error(block[same_experts], exact[same_experts]) <= 1.5 * error(module[same_experts], exact[same_experts])


def test_the_residual_is_added_last():
    layer, config, policy = build_block("qwen2-moe")
    block, (hidden, residual) = bound(layer, config, policy), torch.randn(2, 5, config.hidden_size)
    torch.testing.assert_close(block.forward(hidden, residual), block.forward(hidden) + residual, atol=0, rtol=0)


def test_a_block_sees_new_weights_without_binding_again():
    layer, config, policy = build_block("qwen3-moe")
    block, hidden = bound(layer, config, policy), torch.randn(5, config.hidden_size)
    layer.mlp.experts.down_proj.mul_(-3)
    torch.testing.assert_close(block.forward(hidden), run_block(layer, hidden), atol=1e-5, rtol=1e-5)


def adapt(name):
    family, targets = ADAPTERS[name]
    layer, config, policy = build_block(family)
    # The decoder layer's config is what peft asks for the model type.
    model = peft.get_peft_model(layer, peft.LoraConfig(**({"r": 3, "lora_alpha": 5, "target_modules": []} | targets)))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model.eval(), config, policy


@pytest.mark.parametrize("name", ADAPTERS)
def test_fused_adapters_equal_pefts_own_forward(name):
    model, config, policy = adapt(name)
    layer = model.base_model.model
    before = {key: parameter.clone() for key, parameter in model.named_parameters()}
    block, hidden = bound(layer, config, policy), torch.randn(33, config.hidden_size)
    plain = block.forward(hidden)
    assert block.fuse_lora() > 0
    expected = run_block(layer, hidden)
    assert error(block.forward(hidden), expected) <= 1e-5 * float(expected.abs().max())
    assert error(plain, expected) > 1e-2 * float(expected.abs().max())
    block.unfuse_lora()
    assert torch.equal(block.forward(hidden), plain)
    assert all(torch.equal(before[key], parameter) for key, parameter in model.named_parameters())


@pytest.mark.parametrize("name", ADAPTERS)
def test_disabled_and_merged_adapters_are_not_added_again(name):
    model, config, policy = adapt(name)
    layer, hidden = model.base_model.model, torch.randn(9, config.hidden_size)
    with model.disable_adapter():
        block = bound(layer, config, policy)
        assert block.fuse_lora() == 0
        torch.testing.assert_close(block.forward(hidden), run_block(layer, hidden), atol=1e-5, rtol=1e-5)
    expected = run_block(layer, hidden)
    model.merge_adapter()
    block.bind()
    assert block.fuse_lora() == 0
    assert error(block.forward(hidden), expected) <= 1e-5 * float(expected.abs().max())


def test_without_adapters_nothing_is_fused():
    block = bound(*build_block("gpt-oss"))
    assert block.fuse_lora() == 0


@pytest.mark.parametrize(
    "family,change,message",
    [
        ("mixtral", {"router": "mlp.router"}, "Layer has no 'mlp.router', which its policy names"),
        ("mixtral", {"up": "up_proj"}, "MixtralExperts has no 'up_proj', which its policy names"),
        ("mixtral", {"layout": "plain"}, r"gate_up_proj \[4, 80, 32\] .* do not fit 4 experts of hidden size 32"),
        ("gpt-oss", {"is_stored_transposed": False}, "do not fit 6 experts of hidden size 32 in layout 'interleaved'"),
        ("qwen2-moe", {"shared": ("mlp.gate", "mlp.gate", "mlp.gate")}, "is a Qwen2MoeTopKRouter, not a linear"),
    ],
)
def test_a_policy_that_does_not_fit_names_what_it_misses(family, change, message):
    layer, config, policy = build_block(family)
    with pytest.raises(UnsupportedModelError, match=message):
        MoEBlock(replace(policy, **change), layer, config, "layer 0")


def test_an_unknown_activation_is_refused():
    layer, config, policy = build_block("qwen3-moe")
    config.hidden_act = "tanh"
    with pytest.raises(UnsupportedModelError, match="activation 'tanh'; known are silu"):
        MoEBlock(policy, layer, config, "layer 0")


def test_a_weight_that_is_not_gathered_is_an_error():
    layer, config, policy = build_block("mixtral")
    block = MoEBlock(policy, layer, config, "layer 0")
    layer.mlp.experts.down_proj.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"layer 0 mlp\.experts\.down_proj is not gathered"):
        block.bind()
