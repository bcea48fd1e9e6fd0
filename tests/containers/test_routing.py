"""Recorded experts in passes of transformers' models: the choice is the record's, the weights are the model's own."""

import pytest
import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config, PhimoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.phimoe.modeling_phimoe import PhimoeSparseMoeBlock

from hybrid_engine.containers.policy import UnsupportedModelError
from hybrid_engine.containers.routing import RecordedExperts, Router, find_routers, replaying
from tests.support.models import build_model
from tests.support.models_moe import build_block

NUM_TOKENS = 12
_DEEPSEEK = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "moe_intermediate_size": 24, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 3, "n_routed_experts": 8, "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
DEEPSEEK = {
    "v2-greedy": (DeepseekV2Moe, lambda: DeepseekV2Config(**_DEEPSEEK, topk_method="greedy")),
    "v2-groups": (DeepseekV2Moe, lambda: DeepseekV2Config(**_DEEPSEEK, topk_method="group_limited_greedy")),
    "v3": (DeepseekV3MoE, lambda: DeepseekV3Config(**_DEEPSEEK)),
    "v3-one-group-of-pairs": (
        DeepseekV3MoE,
        lambda: DeepseekV3Config(**{**_DEEPSEEK, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}),
    ),
}


def build(name):
    """A block, its router's description, and a function from fp64 logits and experts to the weights."""
    if name in DEEPSEEK:
        torch.manual_seed(0)
        block_class, build_config = DEEPSEEK[name]
        config = build_config()
        config._experts_implementation = "eager"
        block = block_class(config).eval()
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.3)
        if name.startswith("v3"):
            block.gate.e_score_correction_bias.normal_(std=0.5)
        router = Router(block, name, 8, config.num_experts_per_tok, config.n_group)
    else:
        layer, config, policy = build_block(name)
        block = layer.mlp
        router = Router(block, name, getattr(layer.mlp, policy.router[4:]).weight.shape[0], config.num_experts_per_tok)
    return block, router, config


def weights_of(name, config, logits, experts):
    """The weights of `experts [N, k]` from fp64 logits `[N, X]`, as the papers and model cards say."""
    chosen = logits.gather(1, experts)
    if name == "gpt-oss":
        return chosen.softmax(1)
    if name.startswith("v3"):
        weights = chosen.sigmoid()
        return config.routed_scaling_factor * weights / (weights.sum(1, keepdim=True) if config.norm_topk_prob else 1)
    weights = logits.softmax(1).gather(1, experts)
    if name.startswith("v2"):
        return config.routed_scaling_factor * weights
    is_normalised = name == "mixtral" or config.norm_topk_prob
    return weights / weights.sum(1, keepdim=True) if is_normalised else weights


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "qwen3-moe-unnormalised", "qwen2-moe", "gpt-oss", *DEEPSEEK])
def test_a_block_takes_the_recorded_experts_with_the_weights_of_its_own_logits(name):
    block, router, config = build(name)
    hidden = torch.randn(2, NUM_TOKENS // 2, 32, generator=torch.Generator().manual_seed(1))
    gate = block.router if hasattr(block, "router") else block.gate
    bias = getattr(gate, "bias", None)
    logits = nn.functional.linear(hidden.view(NUM_TOKENS, -1).double(), gate.weight.double())
    logits = logits if bias is None else logits + bias.double()
    # Anything but what the block would choose, within as many groups as it may open.
    per_group = router.num_experts // router.num_groups
    order = logits.argsort(1)
    first = order[:, :1] // per_group * per_group if router.num_groups > 1 else torch.zeros_like(order[:, :1])
    allowed = 2 * per_group if router.num_groups > 1 else router.num_experts
    chance = torch.rand(NUM_TOKENS, allowed, generator=torch.Generator().manual_seed(2))
    experts = (first + chance.argsort(1)[:, : router.top_k]) % router.num_experts
    seen = []
    block.experts.register_forward_pre_hook(lambda module, given: seen.append([part.detach() for part in given[1:]]))
    plain = block(hidden)
    recorded = RecordedExperts(experts[:, None].to(torch.uint8), torch.arange(NUM_TOKENS) % 4 != 3)
    with replaying([router], recorded):
        block(hidden)
    again = block(hidden)
    own, replayed, after = (dict(zip(("experts", "weights"), given, strict=True)) for given in seen)
    is_recorded = recorded.is_recorded
    assert torch.equal(replayed["experts"][is_recorded], experts[is_recorded])
    assert torch.equal(replayed["experts"][~is_recorded], own["experts"][~is_recorded])
    assert not torch.equal(own["experts"].sort(1).values, experts.sort(1).values)
    expected = weights_of(name, config, logits, replayed["experts"])
    torch.testing.assert_close(replayed["weights"].double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(after["experts"], own["experts"])
    first_of = [part[0] if isinstance(part, tuple) else part for part in (plain, again)]
    assert torch.equal(*first_of)


def test_a_router_that_chooses_in_another_way_is_refused_by_name():
    config = PhimoeConfig(hidden_size=32, intermediate_size=24, num_local_experts=4, num_attention_heads=4)
    block = PhimoeSparseMoeBlock(config).eval()
    router = Router(block, "layer 3 mlp.router (PhimoeTopKRouter)", 4, 2)
    recorded = RecordedExperts(torch.zeros(5, 1, 2, dtype=torch.uint8), torch.ones(5, dtype=torch.bool))
    told = r"PhimoeTopKRouter\) cannot replay its choice"
    with pytest.raises(UnsupportedModelError, match=told), replaying([router], recorded):
        block(torch.randn(1, 5, 32))
    block(torch.randn(1, 5, 32))  # the hooks are gone


@pytest.mark.parametrize(
    ("shape", "told"),
    [((5, 3, 2), "3 mixtures, but the model has 2"), ((5, 2, 1), r"1 experts were .*mlp.gate .* takes 2")],
)
def test_a_record_of_another_model_is_refused(shape, told):
    routers = find_routers(build_model("mixtral"))
    recorded = RecordedExperts(torch.zeros(shape, dtype=torch.uint8), torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match=told), replaying(routers, recorded):
        pass


def test_a_model_without_experts_is_refused():
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no mixture of experts"):
        find_routers(build_model("llama"))
