"""A model that is changed after initialize(): what the engine cannot train is refused by name, the rest is followed."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hybrid_engine
from hybrid_engine.zero.sharding import full_tensor
from tests.support.distributed import run_distributed
from tests.support.training_reference import ADAM, CLIPPING, VOCABULARY, engine_config, relative_error, tiny_llama

pytestmark = pytest.mark.torch_versions

STAGES = (0, 1, 2, 3)
TOLERANCE = 1e-5
"""Of weights: the engine's AdamW is fused and rounds otherwise; a step moves them by 1e-2 and more."""


def replace_parameter(model):
    model.model.norm.weight = nn.Parameter(torch.ones(32))


def replace_module(model):
    model.model.layers[1].mlp.up_proj = nn.Linear(32, 63, bias=False)


def append_layer(model):
    model.model.layers.append(copy.deepcopy(tiny_llama().model.layers[-1]))


def remove_module(model):
    model.model.layers[1].mlp.gate_proj = nn.Identity()


def tie_by_hand(model):
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def wrap_by_peft(model):
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


def unfreeze(model):
    model.requires_grad_(True)


def assign_state_dict(model):
    model.load_state_dict(tiny_llama().state_dict(), assign=True)


CHANGES = {
    replace_parameter: r"1 of its parameters have changed.*model\.norm\.weight was replaced",
    replace_module: r"model\.layers\.1\.mlp\.up_proj\.weight was replaced",
    append_layer: r"9 of its parameters.*model\.layers\.2\.self_attn\.q_proj\.weight is new.*\.\.\.; change",
    remove_module: r"model\.layers\.1\.mlp\.gate_proj\.weight is gone",
    tie_by_hand: r"model\.layers\.1\.mlp\.up_proj\.weight (was replaced|is gone)",
    wrap_by_peft: r"model\.layers\.0\.self_attn\.q_proj\.lora_A\.default\.weight is new",
    unfreeze: r"model\.layers\.0\.mlp\.up_proj\.weight requires a gradient and was frozen",
}


def resize(model):
    """Puts other data into the embedding and another module in place of the head."""
    model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)


def set_smaller_data(model):
    model.model.norm.weight.data = torch.ones(8)


def set_data_of_another_dtype(model):
    model.model.norm.weight.data = torch.ones(32, dtype=torch.float64)


# These need whole parameters: PyTorch puts no plain data in a shard's place.
CHANGES_OF_DATA = {
    assign_state_dict: r"model\.embed_tokens\.weight was replaced",
    resize: r"(embed_tokens\.weight has shape \(70, 32\), it had \(65, 32\)|lm_head\.weight was replaced)",
    set_smaller_data: r"model\.norm\.weight has shape \(8,\), it had \(32,\)",
    set_data_of_another_dtype: r"model\.norm\.weight has dtype torch\.float64, it had torch\.float32",
}

SOME = {replace_parameter: CHANGES[replace_parameter], resize: CHANGES_OF_DATA[resize]}
CHANGES_AT = [SOME, CHANGES | CHANGES_OF_DATA, SOME, CHANGES]


def build_engine(stage=0, world_size=1, tie=True):
    model = tiny_llama(tie=tie)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    config = engine_config(stage, world_size, train_batch_size=2 * world_size, gradient_accumulation_steps=1)
    del config["scheduler"]
    return hybrid_engine.initialize(model=model, config=config)[0]


TOKENS = torch.arange(12)[None] % VOCABULARY


def train_step(engine):
    engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)
    engine.step()


def error_of(call, *arguments):
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
    return None


def errors_after(change, engine):
    """What a forward pass, and the step after a backward pass before the change, say of it."""
    train_step(engine)
    engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)
    change(engine.module)
    return error_of(engine, TOKENS), error_of(engine.step)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("change", [*CHANGES, *CHANGES_OF_DATA])
def test_what_the_optimizer_would_not_train_is_refused_by_name_before_it_is_used(change, tie):
    for error in errors_after(change, build_engine(tie=tie)):
        assert error is not None
        with pytest.raises(ValueError, match=(CHANGES | CHANGES_OF_DATA)[change]):
            raise ValueError(error)
        assert "change the model before initialize()" in error


def two_processes(rank, world_size):
    results = {}
    for stage in STAGES:
        for change in CHANGES_AT[stage]:
            results["refused", stage, change.__name__] = errors_after(change, build_engine(stage, world_size))
        results["frozen", stage] = train_frozen_in_between(stage, world_size)
        results["generates", stage] = generate_after_changes(stage, world_size)
        results["none", stage] = step_without_gradients(stage, world_size)
        if stage < 3:
            results["set", stage] = train_with_data_set_in_between(stage, world_size)
    return results


@pytest.fixture(scope="module")
def two_ranks():
    return run_distributed(two_processes, 2)


def test_two_processes_refuse_the_same_at_every_stage(two_ranks):
    for results in two_ranks:
        for stage in STAGES:
            for change, pattern in CHANGES_AT[stage].items():
                for error in results["refused", stage, change.__name__]:
                    with pytest.raises(ValueError, match=pattern):
                        raise ValueError(error)


def freeze(model, is_frozen=True):
    model.model.layers[1].requires_grad_(not is_frozen)
    model.model.embed_tokens.requires_grad_(not is_frozen)


def melt(model):
    freeze(model, False)


def train_frozen_in_between(stage, world_size):
    """Frozen before a forward pass, and after a backward pass, which the step takes no notice of."""
    engine = build_engine(stage, world_size)
    train_step(engine)
    freeze(engine.module)
    train_step(engine)
    train_step(engine)
    melt(engine.module)
    train_step(engine)
    engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)
    freeze(engine.module)
    engine.step()
    train_step(engine)
    return whole(engine)


def train_plainly(changes):
    """A step after each of `changes`, which are functions of the model."""
    model = build_engine().module
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAM)
    for change in changes:
        change(model)
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def whole(engine):
    engine.sharding.settle()
    return {name: full_tensor(param).clone() for name, param in engine.module.named_parameters()}


def test_a_trained_parameter_may_be_frozen_and_trained_again(two_ranks):
    expected = train_plainly([freeze if is_frozen else melt for is_frozen in (0, 1, 1, 0, 0, 1)])
    assert relative_error(train_frozen_in_between(0, 1), expected) < TOLERANCE
    for results in two_ranks:
        for stage in STAGES:
            assert relative_error(results["frozen", stage], expected) < TOLERANCE


def set_data(model):
    """Writes by putting other tensors in place of the parameters' data, as a merge of adapters does."""
    for param in model.parameters():
        param.data = param.data * 1.25


def train_with_data_set_in_between(stage, world_size):
    engine = build_engine(stage, world_size)
    for change in (leave, set_data, leave, set_data):
        change(engine.module)
        train_step(engine)
    return whole(engine)


def leave(model):
    pass


def test_data_of_the_same_size_that_is_set_is_trained_on(two_ranks):
    expected = train_plainly([leave, set_data, leave, set_data])
    assert relative_error(train_with_data_set_in_between(0, 1), expected) < TOLERANCE
    for results in two_ranks:
        for stage in STAGES[:3]:
            assert relative_error(results["set", stage], expected) < TOLERANCE


def step_without_gradients(stage, world_size):
    """What a step says whose loss depends on something that requires a gradient, but on no parameter; then training."""
    engine = build_engine(stage, world_size)
    train_step(engine)
    before = whole(engine)
    engine.backward(torch.ones((), requires_grad=True) * 2)
    error = error_of(engine.step)
    is_same = all(torch.equal(param, before[name]) for name, param in whole(engine).items())
    train_step(engine)
    return error, is_same, engine.global_steps, whole(engine)


def test_a_step_in_which_no_trained_parameter_has_a_gradient_is_an_error_on_every_process(two_ranks):
    expected = train_plainly([leave, leave])
    for outcome in [step_without_gradients(0, 1), *(results["none", s] for results in two_ranks for s in STAGES)]:
        error, is_same, num_steps, weights = outcome
        assert error is not None and "none of the 19 trained parameters has a gradient" in error
        assert is_same and num_steps == 2
        assert relative_error(weights, expected) < TOLERANCE


def test_other_modules_around_the_same_parameters_are_followed_on_one_process():
    engine = build_engine()
    engine.module.model.layers[0] = Around(engine.module.model.layers[0])
    nn.utils.parametrize.register_parametrization(engine.module.model.layers[1].mlp.up_proj, "weight", nn.Identity())
    train_step(engine)
    engine.module = Around(engine.module)
    train_step(engine)
    weights = {
        name.replace("inner.", "").replace("parametrizations.weight.original", "weight"): p
        for name, p in whole(engine).items()
    }
    assert relative_error(weights, train_plainly([leave, leave])) < TOLERANCE


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def generate_after_changes(stage, world_size):
    """What `generate()` says after a change; None where it generates what the model's own does."""
    errors = []
    for change in (wrap_by_peft, replace_parameter, *([] if stage == 3 else [resize])):
        model = tiny_llama()
        model.generation_config.pad_token_id = 0
        config = {"zero_optimization": {"stage": stage}, "hybrid_engine": {"enabled": True}}
        config |= {"train_batch_size": world_size, "optimizer": {"type": "AdamW"}}
        engine = hybrid_engine.initialize(model=model, config=config)[0].eval()
        change(engine.module)
        errors.append(error_of(generate_and_compare, engine))
    return errors


def generate_and_compare(engine):
    with torch.no_grad():
        for param in engine.module.parameters() if engine.sharding.world_size == 1 else ():
            param.add_(0.1 * torch.randn(param.shape))  # adapters begin with zeros
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(TOKENS)}
    tokens = engine.generate(TOKENS, **options)
    assert engine.generator.fallback_reason is None
    assert torch.equal(tokens, type(engine.module).generate(engine.module, TOKENS, **options))


def test_generate_follows_a_change_on_one_process_and_refuses_it_on_several(two_ranks):
    assert generate_after_changes(0, 1) == [None, None, None]
    for results in two_ranks:
        for stage in STAGES:
            added, *others = results["generates", stage]
            assert "lora_A.default.weight is new" in added
            assert all("was replaced" in other or "has shape (70, 32)" in other for other in others)
