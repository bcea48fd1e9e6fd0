"""Loops as people write them themselves: what generate() takes in transformers, in every place of a loop, or an error.

After each of it the engine goes on training and generating.
"""

import copy
import gc
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

import hybrid_engine as deepspeed
from hybrid_engine.zero.sharding import full_tensor
from tests.support.distributed import run_distributed
from tests.support.models import PAD, build_model, padded_prompts

GREEDY = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": PAD, "eos_token_id": [7, 11, 23]}
SETTINGS = [(0, True), (2, True), (3, True), (3, False)]
BOUND = 500  # no 8 tokens reach it: as `encoder_no_repeat_ngram_size` it changes nothing and is not native


def build_engine(model=None, *, stage=0, pinned=True, **config):
    settings = {
        "train_batch_size": 6,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "hybrid_engine": {"enabled": True, "pin_parameters": pinned},
    }
    return deepspeed.initialize(model=model or build_model(), config=settings | config)[0]


def train_step(engine, input_ids, mask):
    engine.train()
    engine.backward(engine(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss)
    engine.step()


def weights(engine):
    return {name: full_tensor(tensor).clone() for name, tensor in engine.module.state_dict().items()}


def is_same(before, after):
    return before.keys() == after.keys() and all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def own_answer(engine, input_ids, mask, **options):
    """What a plain model with the engine's weights generates."""
    plain = build_model()
    plain.load_state_dict(weights(engine))
    return plain.generate(input_ids, attention_mask=mask, **GREEDY | options)


def goes_on(engine, input_ids, mask):
    """Whether a step is one that no rollout preceded, and the rollout after it the model's own."""
    undisturbed = build_engine(copy.deepcopy(engine.module), stage=engine.config.zero_optimization.stage)
    for each in (undisturbed, engine):
        train_step(each, input_ids, mask)
    answer = engine.eval().module.generate(input_ids, attention_mask=mask, **GREEDY)
    return is_same(weights(undisturbed), weights(engine)) and torch.equal(answer, own_answer(engine, input_ids, mask))


class Streamer:
    def __init__(self):
        self.values = []

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.values.append("end")


OPTIONS = {
    "a config": {"generation_config": GenerationConfig(max_new_tokens=5, num_beams=2, early_stopping=True)},
    "a logits processor": {"logits_processor": LogitsProcessorList([lambda ids, scores: scores.flip(-1)])},
    "a stopping criterion": {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(12)])},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True},
    "no cache": {"use_cache": False},
    "a static cache": {"cache_implementation": "static"},
    "end tokens as a tensor": {"eos_token_id": torch.tensor([7, 11])},
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda row, ids: [5, 6, 7]},
    "a dictionary": {"return_dict_in_generate": True},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "logits": {"return_dict_in_generate": True, "output_logits": True},
    "hidden states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "another prompt beside": {"guidance_scale": 1.5, "negative_prompt_ids": padded_prompts()[0]},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPTIONS)
def test_whatever_generate_is_given_the_answer_is_transformers_and_training_goes_on(name):
    input_ids, mask = padded_prompts()
    options = GREEDY | OPTIONS[name]
    engine = build_engine().eval()
    ours = engine.module.generate(input_ids, attention_mask=mask, **options)
    expected = build_model().generate(input_ids, attention_mask=mask, **options)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(ours, expected)
    else:
        assert torch.equal(ours.sequences, expected.sequences)
        assert expected.keys() - ours.keys() <= {"past_key_values"}
        for field in ("scores", "logits"):
            for step, tensor in enumerate(expected.get(field) or ()):
                assert torch.equal(ours[field][step], tensor)
    assert goes_on(engine, input_ids, mask)


def test_a_streamer_is_given_every_token():
    input_ids, mask = padded_prompts(num_prompts=1)
    engine, ours, expected = build_engine().eval(), Streamer(), Streamer()
    engine.module.generate(input_ids, attention_mask=mask, streamer=ours, **GREEDY)
    build_model().generate(input_ids, attention_mask=mask, streamer=expected, **GREEDY)
    assert ours.values == expected.values and ours.values[-1] == "end"
    assert goes_on(engine, *padded_prompts())


def test_embeddings_are_taken_beside_the_prompts_and_not_in_their_place():
    engine = build_engine().eval()
    input_ids, model = padded_prompts()[0][[0, 4]], build_model()
    embeddings = model.get_input_embeddings()(input_ids)
    with pytest.raises(ValueError, match="input_ids is missing"):
        engine.module.generate(inputs_embeds=embeddings, **GREEDY)
    with pytest.raises(ValueError, match="input_ids is missing"):
        engine.module.generate(**GREEDY)
    ours = engine.module.generate(input_ids, inputs_embeds=embeddings, **GREEDY)
    assert torch.equal(ours, model.generate(input_ids, inputs_embeds=embeddings, **GREEDY))
    assert goes_on(engine, *padded_prompts())


CONTEXTS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("more", [{}, {"encoder_no_repeat_ngram_size": BOUND}], ids=["native", "own"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_tensors_made_inside_a_context_are_prompts_like_any_and_training_outside_goes_on(context, more):
    engine = build_engine().eval()
    with CONTEXTS[context]():
        input_ids, mask = padded_prompts()
        output = engine.module.generate(input_ids, attention_mask=mask, **GREEDY, **more)
        expected = build_model().generate(input_ids, attention_mask=mask, **GREEDY)
    if context != "autocast" or more:  # containers compute in the weights' precision everywhere
        assert torch.equal(output, expected)
    assert goes_on(engine, *padded_prompts())


def test_a_new_engine_generates_before_the_first_eval_and_a_training_one_says_what_to_call():
    input_ids, mask = padded_prompts()
    engine = build_engine()
    expected = own_answer(engine, input_ids, mask)
    assert torch.equal(engine.module.generate(input_ids, attention_mask=mask, **GREEDY), expected)
    engine.train()
    with pytest.raises(ValueError, match=r"training mode; call engine.eval\(\) first"):
        engine.module.generate(input_ids, attention_mask=mask, **GREEDY)
    assert goes_on(engine, input_ids, mask)


@pytest.mark.filterwarnings("ignore")
def test_gradient_checkpointing_changes_no_answer():
    input_ids, mask = padded_prompts()
    engine = build_engine()
    engine.gradient_checkpointing_enable()
    engine.enable_input_require_grads()
    for more in ({}, {"encoder_no_repeat_ngram_size": BOUND}):
        engine.eval()
        expected = own_answer(engine, input_ids, mask)
        assert torch.equal(engine.module.generate(input_ids, attention_mask=mask, **GREEDY, **more), expected)
        train_step(engine, input_ids, mask)


class WithValueHead(nn.Module):
    """A language model with a number per token beside its logits, as scripts wrap one for PPO."""

    def __init__(self, model):
        super().__init__()
        self.pretrained_model, self.v_head = model, nn.Linear(model.config.hidden_size, 1)
        nn.init.constant_(self.v_head.weight, 0.1)
        self.config, self.generation_config = model.config, model.generation_config

    def forward(self, input_ids, attention_mask=None):
        output = self.pretrained_model(input_ids, attention_mask=attention_mask, output_hidden_states=True)
        return output.logits, self.v_head(output.hidden_states[-1]).squeeze(-1)

    def generate(self, *args, **kwargs):
        return self.pretrained_model.generate(*args, **kwargs)


class WithoutConfig(WithValueHead):
    def __init__(self, model):
        super().__init__(model)
        del self.config, self.generation_config


class WithEverything(WithValueHead):
    """Looks up on the language model what it has not."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.pretrained_model, name)


def wrapped_rollouts(engine, input_ids, mask):
    """Whether rollouts of a model with a value head are the language model's, before and after a step."""
    results = []
    for _ in range(2):
        plain = build_model()
        prefix = "pretrained_model."
        plain.load_state_dict({k.removeprefix(prefix): v for k, v in weights(engine).items() if prefix in k})
        answer = engine.eval().module.generate(input_ids, attention_mask=mask, **GREEDY)
        results.append(torch.equal(answer, plain.generate(input_ids, attention_mask=mask, **GREEDY)))
        before = weights(engine)
        logits, values = engine.train()(input_ids, attention_mask=mask)
        engine.backward(logits.square().mean() + values.square().mean())
        engine.step()
        results.append(not any(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items()))
    return results


@pytest.mark.parametrize("kind", [WithValueHead, WithEverything])
def test_a_model_with_a_value_head_generates_by_itself_and_everything_trains(kind):
    engine = build_engine(kind(build_model()))
    assert f"{kind.__name__} is no model of transformers" in engine.generator.fallback_reason
    assert wrapped_rollouts(engine, *padded_prompts()) == [True] * 4


def test_a_module_that_generates_but_has_no_config_is_refused():
    with pytest.raises(ValueError, match=r"WithoutConfig has generate\(\) but no config and no generation_config"):
        build_engine(WithoutConfig(build_model()))


def exchange_a_linear(model):
    torch.manual_seed(0)
    model.model.layers[0].self_attn.q_proj = nn.Linear(48, 48, bias=False)


def add_an_adapter(model):
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.eval()


def remove_a_layer(model):
    del model.model.layers[1]
    model.config.num_hidden_layers = 1


@pytest.mark.parametrize("change", [exchange_a_linear, add_an_adapter, remove_a_layer])
def test_modules_exchanged_after_initialize_are_those_that_generate(change):
    input_ids, mask = padded_prompts()
    engine, plain = build_engine().eval(), build_model()
    before = engine.module.generate(input_ids, attention_mask=mask, **GREEDY)
    change(engine.module)
    change(plain)
    expected = plain.generate(input_ids, attention_mask=mask, **GREEDY)
    assert torch.equal(engine.module.generate(input_ids, attention_mask=mask, **GREEDY), expected)
    assert engine.generator.fallback_reason is None and not torch.equal(before, expected)


def hook_after_training(rank, world_size, stage, pinned):
    """What an engine and a plain model generate with a hook, and the engine again without it: answers, reasons."""
    input_ids, mask = padded_prompts()
    engine = build_engine(stage=stage, pinned=pinned)
    train_step(engine, input_ids, mask)
    engine.eval()
    plain = build_model()
    plain.load_state_dict(weights(engine))
    outcomes = []
    hooks = [model.model.layers[0].mlp.register_forward_hook(scale_output) for model in (engine.module, plain)]
    for _ in range(2):
        own = engine.generate(input_ids, attention_mask=mask, **GREEDY)
        theirs = plain.generate(input_ids, attention_mask=mask, **GREEDY)
        outcomes.append((own, theirs, engine.generator.fallback_reason))
        for hook in hooks:
            hook.remove()
    return outcomes


def scale_output(module, given, output):
    return output * -3


@pytest.mark.parametrize(("stage", "pinned", "world_size"), [(0, True, 1), (3, True, 2), (3, False, 2)])
def test_a_hook_put_on_a_layer_after_training_is_followed_as_long_as_it_is_there(stage, pinned, world_size):
    outcomes = run_distributed(hook_after_training, world_size, stage, pinned)
    for hooked, free in outcomes:
        assert torch.equal(hooked[0], hooked[1]) and hooked[2] is not None
        assert torch.equal(free[0], free[1]) and free[2] is None
        assert not torch.equal(hooked[0], free[0])


def test_another_module_than_the_engine_was_built_for_is_refused_in_generate():
    input_ids, mask = padded_prompts()
    engine = build_engine().eval()
    module, engine.module = engine.module, build_model(seed=1)
    with pytest.raises(ValueError, match=r"engine\.module is not the model that this engine was built for"):
        engine.generate(input_ids, attention_mask=mask, **GREEDY)
    engine.module = module
    assert goes_on(engine, input_ids, mask)


def test_a_deleted_engine_is_freed_and_its_module_generates_by_itself_until_it_has_another():
    input_ids, mask = padded_prompts()
    model = build_model()
    expected = model.generate(input_ids, attention_mask=mask, **GREEDY)
    engine = build_engine(model).eval()
    engine.module.generate(input_ids, attention_mask=mask, **GREEDY)
    freed = weakref.ref(engine)
    del engine
    gc.collect()
    assert freed() is None
    for module in (model, copy.deepcopy(model)):
        assert torch.equal(module.generate(input_ids, attention_mask=mask, **GREEDY), expected)
    assert goes_on(build_engine(model), input_ids, mask)


def test_two_engines_generate_inside_one_another():
    input_ids, mask = padded_prompts()
    outer, inner = build_engine().eval(), build_engine(build_model("gpt2")).eval()

    def ask(ids, scores):
        answers.append(inner.module.generate(input_ids, attention_mask=mask, **GREEDY))
        return scores

    answers = []
    expected = own_answer(outer, input_ids, mask)
    output = outer.module.generate(input_ids, attention_mask=mask, logits_processor=[ask], **GREEDY)
    assert torch.equal(output, expected)
    own = build_model("gpt2").generate(input_ids, attention_mask=mask, **GREEDY)
    assert len(answers) > 1 and all(torch.equal(answer, own) for answer in answers)
    assert goes_on(outer, input_ids, mask)


def with_dora():
    """An adapter that containers do not know, so that the first forward pass is an inner module's."""
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True, init_lora_weights=False)
    torch.manual_seed(3)
    return get_peft_model(build_model(), config).eval()


def accumulated(stage, pinned, input_ids, mask, generates):
    """Weights after two steps of three micro-batches, with or without rollouts between forward and backward passes."""
    engine = build_engine(stage=stage, pinned=pinned, gradient_accumulation_steps=3)
    for micro_step in range(6):
        engine.train()
        loss = engine(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss * (1 + micro_step)
        if generates:
            engine.eval()
            for more in ({}, {"encoder_no_repeat_ngram_size": BOUND}):
                engine.module.generate(input_ids, attention_mask=mask, **GREEDY, **more)
            engine.train()
        engine.backward(loss)
        engine.step()
    return weights(engine)


def on_two_ranks(rank, world_size):
    input_ids, mask = (tensor.split([2, 4])[rank] for tensor in padded_prompts())
    results = {}
    for stage, pinned in SETTINGS:
        setting = {"stage": stage, "pinned": pinned}
        results[stage, pinned, "value head"] = wrapped_rollouts(
            build_engine(WithValueHead(build_model()), **setting), input_ids, mask
        )
        engine = build_engine(with_dora(), **setting)
        answer = engine.eval().module.generate(input_ids=input_ids, attention_mask=mask, **GREEDY)
        train_step(engine, input_ids, mask)
        after = engine.eval().module.generate(input_ids=input_ids, attention_mask=mask, **GREEDY)
        results[stage, pinned, "dora"] = answer, not torch.equal(answer, after)
        results[stage, pinned, "accumulated"] = is_same(
            *(accumulated(stage, pinned, input_ids, mask, generates) for generates in (True, False))
        )
        engine = build_engine(**setting).eval()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            results[stage, pinned, "gathered"] = engine.module.generate(input_ids, attention_mask=mask, **GREEDY)
        # Rank 0's rows end after two tokens, rank 1's by length; nobody says synced_gpus.
        ends = own_answer(engine, input_ids, mask, eos_token_id=None)[:, 10].tolist()
        options = {"eos_token_id": ends if rank == 0 else None, "encoder_no_repeat_ngram_size": BOUND}
        answer = engine.module.generate(input_ids, attention_mask=mask, **GREEDY | options)
        results[stage, pinned, "uneven"] = torch.equal(answer, own_answer(engine, input_ids, mask, **options))
        train_step(engine, input_ids, mask)
        after = engine.eval().module.generate(input_ids, attention_mask=mask, **GREEDY)
        results[stage, pinned, "goes on"] = torch.equal(after, own_answer(engine, input_ids, mask))
    try:
        build_engine(engine.module, stage=stage)
    except ValueError as error:
        results["again"] = str(error)
    return results


@pytest.fixture(scope="module")
def two_ranks():
    return run_distributed(on_two_ranks, 2)


@pytest.mark.parametrize(("stage", "pinned"), SETTINGS)
class TestOnTwoProcesses:
    def test_a_model_that_falls_back_rolls_out_before_it_trains(self, two_ranks, stage, pinned):
        for rank, results in enumerate(two_ranks):
            input_ids, mask = (tensor.split([2, 4])[rank] for tensor in padded_prompts())
            assert results[stage, pinned, "value head"] == [True] * 4
            answer, is_other = results[stage, pinned, "dora"]
            assert torch.equal(answer, with_dora().generate(input_ids=input_ids, attention_mask=mask, **GREEDY))
            assert is_other

    def test_rollouts_between_forward_and_backward_pass_and_micro_batches_change_no_weight(
        self, two_ranks, stage, pinned
    ):
        assert all(results[stage, pinned, "accumulated"] for results in two_ranks)

    def test_a_rollout_inside_gathered_parameters_and_uneven_ones_by_the_model_itself(self, two_ranks, stage, pinned):
        for rank, results in enumerate(two_ranks):
            input_ids, mask = (tensor.split([2, 4])[rank] for tensor in padded_prompts())
            expected = build_model().generate(input_ids, attention_mask=mask, **GREEDY)
            assert torch.equal(results[stage, pinned, "gathered"], expected)
            assert results[stage, pinned, "uneven"] and results[stage, pinned, "goes on"]


def test_a_model_that_another_engine_has_sharded_is_refused(two_ranks):
    assert all("another engine has sharded it already" in results["again"] for results in two_ranks)
