"""LoRA as scripts for DeepSpeed write it themselves, found by its attributes: see `lora_linear.LinearLoRA`."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import hybrid_engine
from hybrid_engine import zero
from hybrid_engine.containers.views import TensorParallel
from hybrid_engine.extensions.megatron.loading import load_megatron_gpt
from hybrid_engine.inference.build import share_linears
from hybrid_engine.inference.config import read_config
from tests.inference.test_init_inference import build_unlisted
from tests.support.distributed import run_distributed
from tests.support.family_checks import adapted as with_peft
from tests.support.family_checks import check_training_step
from tests.support.lora_linear import LinearLoRA, adapters, randomise_adapters, replace_linears
from tests.support.megatron_model import build_oracle, save_megatron
from tests.support.models import BUILDERS, PAD, build_model, module_logprobs, padded_prompts

pytestmark = pytest.mark.long

GREEDY = {"do_sample": False, "max_new_tokens": 7, "pad_token_id": PAD, "eos_token_id": None}


def build_engine(model, *, stage=0, **hybrid_options):
    config = {
        "train_batch_size": 2,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "hybrid_engine": {"enabled": True, **hybrid_options},
    }
    engine, *_ = hybrid_engine.initialize(model=model, config=config)
    assert engine.generator.fallback_reason is None
    return engine.eval()


def adapted(family="llama", **options):
    """Adapters that do something on every linear, the LM head too."""
    return randomise_adapters(replace_linears(build_model(family), **options)).eval()


def generate(model, **options):
    input_ids, mask = padded_prompts()
    return model.generate(input_ids=input_ids, attention_mask=mask, **GREEDY, **options)


@pytest.mark.parametrize("family", BUILDERS)
def test_a_new_adapter_changes_nothing_and_what_it_learns_reaches_the_next_rollout(family):
    mask, own = padded_prompts()[1], adapted(family)
    engine = build_engine(replace_linears(build_model(family)))
    base = generate(engine)
    assert torch.equal(base, generate(build_model(family)))
    randomise_adapters(engine.module)
    before = {name: parameter.clone() for name, parameter in engine.module.named_parameters()}
    output = generate(engine, return_dict_in_generate=True)
    assert torch.equal(output.sequences, generate(own)) and not torch.equal(output.sequences, base)
    logprobs = module_logprobs(own, output.sequences, mask).float()
    torch.testing.assert_close(output.logprobs, logprobs, atol=5e-5, rtol=0)
    assert all(torch.equal(parameter, before[name]) for name, parameter in engine.module.named_parameters())


@pytest.mark.parametrize("family", BUILDERS)
def test_every_adapter_of_a_family_has_a_place_in_the_containers(family):
    engine = build_engine(adapted(family))
    engine.fuse_lora_weight()
    linears = [*engine.convert_to_linear_transposed(), *engine.generator.model._linears]
    fused = {id(linear.module) for linear in linears if linear.is_fused}
    assert fused == {id(adapter) for adapter in adapters(engine.module)} and len(fused) >= 9


@pytest.mark.parametrize("family", BUILDERS)
def test_a_training_step_after_a_rollout_is_that_of_a_plain_loop_with_its_dropout(family):
    check_training_step(lambda: adapted(family, dropout=0.5))


def test_dropout_of_adapters_is_on_in_training_mode_and_off_in_every_rollout():
    input_ids, mask = padded_prompts()
    engine, expected = build_engine(adapted(dropout=0.9)), generate(adapted(dropout=0.0))
    for _ in range(2):
        assert torch.equal(generate(engine.eval()), expected)
        engine.train()
        assert all(adapter.lora_dropout.training for adapter in adapters(engine.module))
        first, second = (engine(input_ids=input_ids, attention_mask=mask).logits for _ in range(2))
        assert not torch.allclose(first, second)


def test_a_scaling_of_zero_switches_adapters_off_and_another_scales_them():
    engine, own = build_engine(adapted()), adapted()
    answers = []
    for scaling in (0, 0.0, 0.3, 2.0):
        for model in (engine.module, own):
            for adapter in adapters(model):
                adapter.lora_scaling = scaling
        answers.append(generate(engine))
        assert torch.equal(answers[-1], generate(own))
    assert torch.equal(answers[0], generate(build_model())) and torch.equal(answers[1], answers[0])
    assert not torch.equal(answers[2], answers[0]) and not torch.equal(answers[3], answers[2])


def test_adapters_that_the_script_fused_are_not_added_again():
    engine, expected = build_engine(adapted()), generate(adapted())
    some, *others = adapters(engine.module)
    some.fuse_lora_weight()
    assert torch.equal(generate(engine), expected)
    for adapter in others:
        adapter.fuse_lora_weight()
    assert torch.equal(generate(engine), expected)
    assert not any(linear.is_fused for linear in engine.convert_to_linear_transposed())
    for adapter in adapters(engine.module):
        adapter.unfuse_lora_weight()
    assert torch.equal(generate(engine), expected)


def test_the_flag_alone_gives_the_base_model():
    engine = build_engine(adapted())
    for adapter in adapters(engine.module):
        adapter.fuse_lora = True
    assert torch.equal(generate(engine), generate(build_model()))


class SubclassedLoRA(nn.Linear):
    """A linear with an adapter and neither dropout nor flag."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.weight, self.bias, self.lora_scaling = linear.weight, linear.bias, torch.tensor(0.5)
        self.lora_right_weight = nn.Parameter(torch.randn(self.in_features, 2) * 0.3)
        self.lora_left_weight = nn.Parameter(torch.randn(2, self.out_features) * 0.3)

    def forward(self, input):
        return super().forward(input) + input @ self.lora_right_weight @ self.lora_left_weight * self.lora_scaling


def test_a_subclass_of_linear_and_adapters_without_dropout_or_flag_are_found():
    model = build_model()
    for layer in model.model.layers:
        layer.self_attn.q_proj = SubclassedLoRA(layer.self_attn.q_proj)
    expected = generate(copy.deepcopy(model))
    assert not torch.equal(expected, generate(build_model()))
    assert torch.equal(generate(build_engine(model)), expected)


class Adaptable(nn.Linear):
    """A linear that adds an adapter once it has been given one."""

    def forward(self, input):
        output = super().forward(input)
        if not hasattr(self, "lora_right_weight"):
            return output
        return output + input @ self.lora_right_weight @ self.lora_left_weight * self.lora_scaling


def test_an_adapter_that_a_linear_is_given_between_two_rollouts_is_followed():
    model = build_model("llama")
    attention = model.model.layers[0].self_attn
    old = attention.v_proj
    attention.v_proj = linear = Adaptable(old.in_features, old.out_features, bias=False)
    linear.load_state_dict(old.state_dict())
    engine = build_engine(model)
    base = generate(engine, return_dict_in_generate=True)
    torch.manual_seed(1)
    for name, shape in (("right", (old.in_features, 2)), ("left", (2, old.out_features))):
        setattr(linear, f"lora_{name}_weight", nn.Parameter(torch.randn(shape), requires_grad=False))
    linear.lora_scaling = 0.5
    output = generate(engine, return_dict_in_generate=True)
    assert engine.generator.fallback_reason is None and not torch.equal(output.logprobs, base.logprobs)
    logprobs = module_logprobs(model, output.sequences, padded_prompts()[1]).float()
    torch.testing.assert_close(output.logprobs, logprobs, atol=5e-5, rtol=0)


def test_adapters_on_experts_and_routers_that_are_linears_learn_and_reach_the_rollout(tmp_path):
    save_megatron(build_oracle(num_experts=(3, 0), top_k=2, is_residual=True), tmp_path)
    model = replace_linears(load_megatron_gpt(tmp_path))
    assert any(isinstance(module, LinearLoRA) for name, module in model.named_modules() if name.endswith("gate.wg"))
    engine = build_engine(model.eval())
    base = generate(engine)
    expected = generate(randomise_adapters(copy.deepcopy(model)))
    randomise_adapters(engine.module)
    assert torch.equal(generate(engine), expected) and not torch.equal(expected, base)


class OwnConv1D(nn.Module):
    """In the place of a Conv1D, not derived from it."""

    def __init__(self, conv):
        super().__init__()
        self.weight, self.bias, self.lora_scaling = conv.weight, conv.bias, 0.5
        inputs, outputs = self.weight.shape
        self.lora_right_weight = nn.Parameter(torch.randn(inputs, 2) * 0.3)
        self.lora_left_weight = nn.Parameter(torch.randn(2, outputs) * 0.3)

    def forward(self, input):
        update = self.lora_scaling * self.lora_right_weight @ self.lora_left_weight
        return input @ (self.weight + update) + self.bias


@pytest.mark.parametrize("name", ["c_fc", "c_proj"])
def test_what_takes_the_place_of_a_conv1d_is_read_as_it_is_stored_or_left_to_the_model(name):
    """A square weight does not say which way round it lies."""
    model = build_model("gpt2")
    torch.manual_seed(0)
    for layer in model.transformer.h:
        parent = layer.mlp if name == "c_fc" else layer.attn
        setattr(parent, name, OwnConv1D(getattr(parent, name)))
    expected = generate(copy.deepcopy(model))
    assert not torch.equal(expected, generate(build_model("gpt2")))
    engine = hybrid_engine.initialize(model=model, config={"train_batch_size": 1, "hybrid_engine": {"enabled": True}})[
        0
    ]
    assert (engine.generator.fallback_reason is None) == (name == "c_fc")
    assert torch.equal(generate(engine.eval()), expected)


@pytest.mark.parametrize("family", ["llama", "llama-mha-tied", "phi3", "gpt2"])
def test_the_saved_model_has_the_adapters_merged_and_the_live_one_not(tmp_path, family):
    mask, engine = padded_prompts()[1], build_engine(adapted(family))
    adapters(engine.module)[0].fuse_lora_weight()  # this one is in the weight already
    expected = generate(engine, return_dict_in_generate=True)
    before = {name: parameter.clone() for name, parameter in engine.module.named_parameters()}
    engine.save_16bit_model(tmp_path)
    assert all(torch.equal(parameter, before[name]) for name, parameter in engine.module.named_parameters())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(generate(saved), expected.sequences)
    logprobs = module_logprobs(saved, expected.sequences, mask).float()
    torch.testing.assert_close(expected.logprobs, logprobs, atol=5e-5, rtol=0)


@pytest.mark.parametrize("adapt", [replace_linears, with_peft], ids=["own", "peft"])
def test_processes_that_share_a_model_without_a_policy_ask_for_merged_adapters(adapt):
    config = read_config(None, {"tensor_parallel": {"tp_size": 2}})
    with pytest.raises(ValueError, match=r"q_proj carries an adapter.*merge the adapters first"):
        share_linears(adapt(build_unlisted()), config, TensorParallel(size=2))


def test_the_report_counts_them():
    assert "LoRA on 14 linears" in build_engine(adapted()).report()


def fuse_sharded(rank, world_size):
    """Fuses and unfuses at stage 3 as scripts do; and what every family answers there, gathered and streamed."""
    input_ids, mask = (tensor.chunk(world_size)[rank] for tensor in padded_prompts())

    def answer(**options):
        return engine.generate(input_ids, attention_mask=mask, **GREEDY, **options)

    engine = build_engine(adapted(), stage=3)
    answers = [answer()]
    for method in (LinearLoRA.fuse_lora_weight, LinearLoRA.unfuse_lora_weight):
        for adapter in adapters(engine.module):
            params = [adapter.weight, adapter.lora_left_weight, adapter.lora_right_weight]
            with zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
                method(adapter)
        answers.append(answer())
    flags = [adapter.fuse_lora for adapter in adapters(engine.module)]
    families = {}
    for index, family in enumerate(BUILDERS):
        engine = build_engine(adapted(family), stage=3, pin_parameters=index % 2 == 0)
        output = answer(return_dict_in_generate=True)
        families[family] = output.sequences, output.logprobs
    return answers, flags, families


@pytest.fixture(scope="module")
def two_ranks():
    return run_distributed(fuse_sharded, 2)


def test_scripts_fuse_and_unfuse_sharded_weights_between_rollouts(two_ranks):
    expected = generate(adapted())
    for answers in zip(*(part[0] for part in two_ranks), strict=True):
        assert torch.equal(torch.cat(answers), expected)
    assert not any(flag for part in two_ranks for flag in part[1])


@pytest.mark.parametrize("family", BUILDERS)
def test_adapters_of_every_family_reach_rollouts_from_sharded_weights(two_ranks, family):
    own = adapted(family)
    sequences, logprobs = (torch.cat(parts) for parts in zip(*(part[2][family] for part in two_ranks), strict=True))
    assert torch.equal(sequences, generate(own))
    expected = module_logprobs(own, sequences, padded_prompts()[1]).float()
    torch.testing.assert_close(logprobs, expected, atol=5e-5, rtol=0)
