"""Defects of DeepSpeed's hybrid engine that must not be ours: one test each, in the order of their list."""

import copy
from contextlib import contextmanager

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LogitsProcessorList, StoppingCriteriaList

import hybrid_engine
from hybrid_engine.zero.sharding import full_tensor, local_tensor
from tests.support.distributed import run_distributed
from tests.support.lora_linear import adapters, randomise_adapters, replace_linears
from tests.support.model_families import VOCAB
from tests.support.models import PAD, build_model, module_logprobs, padded_prompts, randomised
from tests.support.paths import DOCS

pytestmark = pytest.mark.long

GREEDY = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": PAD, "eos_token_id": None}
SAMPLED = {**GREEDY, "do_sample": True, "top_k": 0, "temperature": 1.5, "num_return_sequences": 3}


def build_engine(model, *, stage=0, lr=1e-2, config=None, **hybrid_options):
    settings = {
        "train_batch_size": 6,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": lr}},
        "hybrid_engine": {"enabled": True, **hybrid_options},
    }
    engine = hybrid_engine.initialize(model=model, config=settings | (config or {}))[0]
    assert engine.generator.fallback_reason is None
    return engine


def train_step(engine, input_ids, mask):
    engine.train()
    engine.backward(engine(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss)
    engine.step()


def weights(engine):
    """Copies of all parameters by name, whole; collective on several processes."""
    return {name: full_tensor(parameter).clone() for name, parameter in engine.module.named_parameters()}


def own_weights(engine):
    """Copies of what this process holds of all parameters, by name."""
    return {name: local_tensor(parameter).clone() for name, parameter in engine.module.named_parameters()}


def is_same(before, after):
    return before.keys() == after.keys() and all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def with_peft(model):
    """peft's LoRA on every linear of `model`, with adapters that do something."""
    adapted = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return adapted.eval()


def with_lora_linears(model):
    """LoRA as scripts for DeepSpeed write it, on every linear of `model`."""
    return randomise_adapters(replace_linears(model, scaling=1.0, dropout=0.0)).eval()


ADAPTED = {"peft": with_peft, "written by the script": with_lora_linears}


def merged(model):
    """A plain model of transformers whose weights have the adapters of `model` added."""
    if hasattr(model, "merge_and_unload"):
        return model.merge_and_unload()
    plain = copy.deepcopy(model)
    for adapter in adapters(plain):  # not in place: a tied head would take the embedding with it
        adapter.weight, adapter.fuse_lora = nn.Parameter(adapter.weight + adapter.update()), True
    return plain


# 1


@pytest.mark.parametrize("family", ["llama", "opt-post-norm-projection", "gpt-neox-parallel", "gptj", "gpt2"])
def test_everything_trainable_moves_after_containers_are_built(family):
    """DeepSpeed sets requires_grad=False on `lm_head` and every other linear outside the layers."""
    input_ids, mask = padded_prompts()
    engine = build_engine(build_model(family))
    before = weights(engine)
    engine.eval().generate(input_ids, attention_mask=mask, **GREEDY)
    train_step(engine, input_ids, mask)
    trainable = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name, _ in build_model(family).named_parameters()}
    assert [name for name, tensor in weights(engine).items() if torch.equal(tensor, before[name])] == []


def learning_steps(rank, world_size):
    """At each stage, with each kind of adapter: what a step after a rollout did not move, what it did, and how far the
    rollout from the new weights is from the trainer's log-probabilities.
    """
    input_ids, mask = (tensor.split([4, 2])[rank] for tensor in padded_prompts())
    results = {}
    for stage in (0, 1, 2, 3):
        for kind, adapt in {"none": nn.Module.eval, **ADAPTED}.items():
            for is_pinned in (True, False) if stage == 3 else (True,):
                engine = build_engine(adapt(build_model()), stage=stage, pin_parameters=is_pinned)
                before = weights(engine)
                engine.eval().generate(input_ids, attention_mask=mask, **GREEDY)
                train_step(engine, input_ids, mask)
                after, trainable = weights(engine), {n for n, p in engine.module.named_parameters() if p.requires_grad}
                moved = {name for name in before if not torch.equal(before[name], after[name])}
                output = engine.eval().generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
                expected = module_logprobs(engine, output.sequences, mask)
                distance = (output.logprobs - expected).abs().max().item()
                results[stage, kind, is_pinned] = trainable, moved, distance
    return results


@pytest.mark.parametrize("kind", ["none", *ADAPTED])
def test_at_every_stage_what_trains_is_what_trained_before_and_the_next_rollout_sees_all_of_it(two_ranks, kind):
    model = {"none": nn.Module.eval, **ADAPTED}[kind](build_model())
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert (kind == "none") == all("lora" not in name for name in trainable)
    assert any("lm_head" in name for name in trainable) == (kind != "peft")  # which leaves it out of all linears
    settings = [(stage, kind, True) for stage in (0, 1, 2, 3)] + [(3, kind, False)]
    for part in two_ranks:
        for setting in settings:
            found, moved, distance = part["learned"][setting]
            assert (found, moved) == (trainable, trainable), setting
            assert distance < 5e-5, setting


# 2


def rows_of_both(parts):
    """Tokens and log-probabilities of two ranks' prompts, one below the other."""
    return (torch.cat(tensors) for tensors in zip(*parts, strict=True))


def unpinned_rollouts(rank, world_size):
    """Greedy rollouts of each kind of adapter from layers streamed at stage 3: tokens and their log-probabilities."""
    input_ids, mask = (tensor.chunk(world_size)[rank] for tensor in padded_prompts())
    answers = {}
    for kind, adapt in ADAPTED.items():
        engine = build_engine(adapt(build_model()), stage=3, pin_parameters=False).eval()
        output = engine.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
        answers[kind] = output.sequences, output.logprobs
    return answers


@pytest.mark.parametrize("kind", ADAPTED)
def test_at_stage_3_without_pinned_parameters_prefill_and_decoding_both_see_the_adapters(two_ranks, kind):
    """DeepSpeed fuses the adapters for the prefill only and decodes with the base model."""
    input_ids, mask = padded_prompts()
    model = merged(ADAPTED[kind](build_model()))
    sequences, logprobs = rows_of_both(part["unpinned"][kind] for part in two_ranks)
    assert torch.equal(sequences, model.generate(input_ids, attention_mask=mask, **GREEDY))
    torch.testing.assert_close(logprobs, module_logprobs(model, sequences, mask).float(), atol=5e-5, rtol=0)
    # The base model would have said something else, at the first token and at those after it.
    base = module_logprobs(build_model(), sequences, mask)
    assert ((base - logprobs).abs() > 0.01).any(0).all()


# 3


@pytest.mark.parametrize("family", ["llama", "llama-mha-tied"])
@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_of_llama_are_found_on_every_linear_and_reach_the_rollout(kind, family):
    """DeepSpeed does not find the adapters of a Llama, or ends with an AttributeError."""
    input_ids, mask = padded_prompts()
    engine = build_engine(ADAPTED[kind](build_model(family))).eval()
    engine.fuse_lora_weight()
    linears = engine.convert_to_linear_transposed()
    assert len(linears) == 14 and all(linear.is_fused for linear in linears)
    engine.unfuse_lora_weight()
    expected = merged(ADAPTED[kind](build_model(family))).generate(input_ids, attention_mask=mask, **GREEDY)
    assert torch.equal(engine.generate(input_ids, attention_mask=mask, **GREEDY), expected)
    assert not torch.equal(build_model(family).generate(input_ids, attention_mask=mask, **GREEDY), expected)


# 4


@pytest.mark.parametrize("family", ["llama", "qwen3-qk-norm", "phi3", "falcon-multi-query", "falcon-new-two-norms"])
def test_keys_and_values_of_fewer_heads_are_read_and_trained_as_they_are(family):
    """DeepSpeed cuts query, key and value weights as thirds, which destroys those of grouped-query models."""
    input_ids, mask = padded_prompts()
    engine, plain = build_engine(build_model(family)), build_model(family)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    for _ in range(2):
        expected = plain.eval().generate(input_ids, attention_mask=mask, **GREEDY)
        before = weights(engine)
        assert torch.equal(engine.eval().generate(input_ids, attention_mask=mask, **GREEDY), expected)
        assert is_same(before, weights(engine))
        train_step(engine, input_ids, mask)
        plain.train()(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert is_same(weights(engine), dict(plain.named_parameters()))


# 5


@pytest.mark.parametrize("kind", ADAPTED)
def test_a_hundred_fusings_in_bf16_leave_every_weight_as_it_was_to_the_bit(kind):
    """DeepSpeed adds the update to the base weight and subtracts it again: 1e-3 relative after one cycle."""
    # Those of a model that no engine has touched: building one fuses once already.
    before = {name: tensor.bfloat16() for name, tensor in ADAPTED[kind](build_model()).named_parameters()}
    engine = build_engine(ADAPTED[kind](build_model()), config={"bf16": {"enabled": True}}).eval()
    linears = engine.convert_to_linear_transposed()
    for _ in range(100):
        engine.fuse_lora_weight()
        assert all(linear.is_fused for linear in linears)
        engine.unfuse_lora_weight()
    assert is_same(before, weights(engine))
    input_ids, mask = padded_prompts()
    for _ in range(20):
        engine.eval().generate(input_ids, attention_mask=mask, **GREEDY)
        engine.train()
    assert is_same(before, weights(engine))


def fused_on_shards(rank, world_size):
    """Whether weights sharded at stage 3 are to the bit what they were after fusing, rollouts and what ends them."""
    input_ids, mask = (tensor.chunk(world_size)[rank] for tensor in padded_prompts())
    results = {}
    for kind, adapt in ADAPTED.items():
        for is_pinned in (True, False):
            engine = build_engine(
                adapt(build_model()), stage=3, config={"bf16": {"enabled": True}}, pin_parameters=is_pinned
            )
            before = own_weights(engine)
            for _ in range(5):
                engine.fuse_lora_weight()
                engine.unfuse_lora_weight()
                engine.eval().generate(input_ids, attention_mask=mask, **GREEDY | {"max_new_tokens": 3})
                engine.train()
            results[kind, is_pinned] = is_same(before, own_weights(engine))
    return results


def test_fusings_of_sharded_weights_leave_every_shard_as_it_was(two_ranks):
    assert all(part["fused"].values() for part in two_ranks)


# 6

SHARED = ["llama", "gpt2", "phi3"]  # separate, fused and transposed, fused projections


def shared_rollouts(rank, world_size):
    """Rollouts of two processes that share the model, each with four or two padded prompts of its own."""
    input_ids, mask = (tensor.split([4, 2])[rank] for tensor in padded_prompts())
    answers = {}
    for kind, adapt in {"none": nn.Module.eval, **ADAPTED}.items():
        for family in SHARED:
            engine = build_engine(adapt(build_model(family)), stage=3, inference_tp_size=2).eval()
            assert engine.generator.group.size == 2
            output = engine.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
            answers[kind, family] = output.sequences, output.logprobs
    return answers


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("family", SHARED)
@pytest.mark.parametrize("kind", ["none", *ADAPTED])
def test_two_processes_share_a_model_without_an_mpu_and_with_an_attention_mask(two_ranks, kind, family):
    """DeepSpeed needs an mpu for `inference_tp_size` > 1, and gathers the prompts of a group but not their masks."""
    input_ids, mask = padded_prompts()
    assert not mask.all(1)[:4].all() and not mask.all(1)[4:].all()  # either process has padding
    model = build_model(family) if kind == "none" else merged(ADAPTED[kind](build_model(family)))
    sequences, logprobs = rows_of_both(part["shared"][kind, family] for part in two_ranks)
    assert torch.equal(sequences, model.generate(input_ids, attention_mask=mask, **GREEDY))
    torch.testing.assert_close(logprobs, module_logprobs(model, sequences, mask).float(), atol=5e-5, rtol=0)


# 7


class PowerCut(BaseException):
    """Passes every `except Exception`, like Ctrl-C."""


class Failing:
    """Calls `function` and raises a PowerCut at call number `nth`."""

    def __init__(self, function, nth):
        self.function, self.nth, self.error = function, nth, PowerCut()

    def __call__(self, *args, **kwargs):
        self.nth -= 1
        if self.nth == 0:
            raise self.error
        return self.function(*args, **kwargs)


def _containers(engine):
    return engine.generator.model.layers


def _last_linear(engine):
    """Its bindings and fusings come after those of everything else in the layers."""
    return engine.convert_to_linear_transposed()[-1]


# What fails, and at which of its calls; a rollout calls a layer for the prefill and for each further token.
INSIDE_ROLLOUTS = {
    "binding weights": (_last_linear, "bind", 1),
    "fusing adapters": (_last_linear, "fuse_lora", 1),
    "taking the workspace": (lambda engine: engine.generator.workspace, "take", 1),
    "prefill": (lambda engine: _containers(engine)[1], "forward", 1),
    "decoding": (lambda engine: _containers(engine)[1], "forward", 4),
}
# What fails inside the model's own generate(): an option for it, made of a callable.
INSIDE_OPTIONS = {
    "a logits processor": lambda call: {"logits_processor": LogitsProcessorList([call])},
    "a stopping criterion": lambda call: {"stopping_criteria": StoppingCriteriaList([call])},
}
PLACES = [*INSIDE_ROLLOUTS, *INSIDE_OPTIONS, "the model's own forward"]


@contextmanager
def failing(place, engine):
    """Inside, a rollout with the options it yields raises the error it yields."""
    if place in INSIDE_OPTIONS:
        returned = {
            "a logits processor": lambda ids, scores: scores,
            "a stopping criterion": lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool),
        }
        call = Failing(returned[place], 3)
        yield INSIDE_OPTIONS[place](call), call.error
        return
    if place in INSIDE_ROLLOUTS:
        find, name, nth = INSIDE_ROLLOUTS[place]
        owner, options = find(engine), {}
    else:  # an option that containers do not serve, and that changes nothing here
        decoder_layer = [module for module in engine.module.modules() if "DecoderLayer" in type(module).__name__][1]
        owner, name, nth, options = decoder_layer, "forward", 3, {"encoder_no_repeat_ngram_size": 500}
    call = Failing(getattr(owner, name), nth)
    setattr(owner, name, call)
    try:
        yield options, call.error
    finally:
        delattr(owner, name)


def train_and_generate(engine, input_ids, mask):
    """What this process holds of the weights after a step, and a rollout from them."""
    train_step(engine, input_ids, mask)
    return own_weights(engine), engine.eval().generate(input_ids, attention_mask=mask, **GREEDY)


def undisturbed(kind, stage, input_ids, mask):
    return train_and_generate(build_engine(ADAPTED[kind](build_model()), stage=stage), input_ids, mask)


def break_off(place, engine, rollout, input_ids, mask):
    """What is wrong after a rollout that breaks off, and after the next one, which is to be `rollout`."""
    before, found = own_weights(engine), []
    with failing(place, engine) as (options, error):
        try:
            engine.generate(input_ids, attention_mask=mask, **GREEDY, **options)
            found.append("nothing was raised")
        except PowerCut as raised:
            if raised is not error:
                found.append("another error was raised")
    is_apart = engine.sharding.is_sharded and engine.zero_optimization_stage() == 3
    if any(isinstance(parameter, DTensor) != is_apart for parameter in engine.module.parameters()):
        found.append("weights are gathered that were not, or the other way round")
    if not is_same(before, own_weights(engine)):
        found.append("weights changed")
    if any(linear.is_fused for linear in engine.convert_to_linear_transposed()):
        found.append("adapters are still fused")
    if engine.module.training:
        found.append("the mode changed")
    if not torch.equal(engine.generate(input_ids, attention_mask=mask, **GREEDY), rollout):
        found.append("the next rollout is another")
    return found


def learn_after(engine, expected, input_ids, mask):
    """What is wrong with training and the rollout after it, `expected` to be those of an undisturbed engine."""
    trained, rollout = train_and_generate(engine, input_ids, mask)
    found = [] if is_same(expected[0], trained) else ["training is another"]
    return found if torch.equal(expected[1], rollout) else [*found, "the rollout after training is another"]


# Kind of adapters, stage, and how the weights come together for a rollout.
BROKEN = {
    "gathered": ("peft", 3, {}),
    "streamed": ("peft", 3, {"pin_parameters": False}),
    "streamed, adapters of the script": ("written by the script", 3, {"pin_parameters": False}),
    "shared": ("written by the script", 3, {"inference_tp_size": 2}),
    "stage 2": ("written by the script", 2, {"release_inference_cache": True}),
}


def broken_rollouts(rank, world_size):
    """For each place and each way of BROKEN what was wrong afterwards, and in training after all of them."""
    prompts = [tensor.chunk(world_size)[rank] for tensor in padded_prompts()]
    results = {}
    for way, (kind, stage, options) in BROKEN.items():
        engine = build_engine(ADAPTED[kind](build_model()), stage=stage, **options)
        rollout = engine.eval().generate(prompts[0], attention_mask=prompts[1], **GREEDY)
        for place in PLACES:
            results[place, way] = break_off(place, engine, rollout, *prompts)
        results["training", way] = learn_after(engine, undisturbed(kind, stage, *prompts), *prompts)
    return results


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_inside_generate_leaves_everything_as_it_was_and_is_raised_again(two_ranks, place):
    """DeepSpeed has no `finally`: the model stays fused and gathered."""
    prompts = padded_prompts()
    for kind, adapt in ADAPTED.items():
        engine = build_engine(adapt(build_model())).eval()
        rollout = engine.generate(prompts[0], attention_mask=prompts[1], **GREEDY)
        assert break_off(place, engine, rollout, *prompts) == []
        assert learn_after(engine, undisturbed(kind, 0, *prompts), *prompts) == []
    for part in two_ranks:
        assert {way: found for way in BROKEN if (found := part["broken"][place, way])} == {}


def test_after_exceptions_inside_generate_sharded_weights_train_as_if_nothing_had_happened(two_ranks):
    for part in two_ranks:
        assert {way: found for way in BROKEN if (found := part["broken"]["training", way])} == {}


# 8


# How samples are drawn: on containers, from weights that are whole, gathered, streamed or shared; by the model itself.
DRAWN = {
    "whole": (0, {}, {}),
    "gathered": (3, {}, {}),
    "streamed": (3, {"pin_parameters": False}, {}),
    "shared": (3, {"inference_tp_size": 2}, {}),
    "own": (0, {}, {"encoder_no_repeat_ngram_size": 500}),
    "own, gathered": (3, {}, {"encoder_no_repeat_ngram_size": 500}),
}


def sampled_rollouts(rank, world_size, ways=DRAWN):
    """Samples of the same prompt, on two rows of each rank, under one seed, another and none."""
    prompts = padded_prompts()[0][:1].expand(4, -1).chunk(world_size)[rank]
    results = {}
    for way in ways:
        stage, hybrid_options, options = DRAWN[way]
        model = build_model()
        torch.manual_seed(100 + rank)
        state = torch.get_rng_state()
        engine = build_engine(model, stage=stage, **hybrid_options).eval()
        keeps_state = torch.equal(torch.get_rng_state(), state)

        def sample(engine=engine, options=options, **seed):
            return engine.generate(prompts, **SAMPLED, **options, **seed)[:, prompts.shape[1] :]

        unseeded = []
        for _ in range(2):
            torch.manual_seed(7)  # the same on all ranks, as scripts do
            unseeded.append(sample())
        results[way] = {
            "keeps_state": keeps_state,
            "seeded": [sample(seed=5), sample(seed=5)],
            "unseeded": unseeded,
            "other": [sample(seed=6)],
        }
    return results


@pytest.mark.parametrize("way", DRAWN)
def test_samples_differ_by_rank_and_row_and_are_reproducible_on_any_number_of_ranks(two_ranks, way):
    """DeepSpeed gives every rank the random state of rank 0, so all draw the same samples for the same prompt."""
    parts = [part["sampled"][way] for part in two_ranks]
    assert all(part["keeps_state"] for part in parts)
    samples = {kind: torch.cat([part[kind][0] for part in parts]) for kind in ("seeded", "unseeded", "other")}
    for kind in ("seeded", "unseeded"):
        assert len({tuple(row) for row in samples[kind].tolist()}) == 12
        assert torch.equal(samples[kind], torch.cat([part[kind][1] for part in parts]))
    assert not torch.equal(samples["other"], samples["seeded"])
    if "own" not in way:  # which draws by the process
        alone = sampled_rollouts(0, 1, ["whole"])["whole"]
        assert all(torch.equal(samples[kind], alone[kind][0]) for kind in samples)


def rank_work(rank, world_size):
    return {
        "learned": learning_steps(rank, world_size),
        "fused": fused_on_shards(rank, world_size),
        "unpinned": unpinned_rollouts(rank, world_size),
        "shared": shared_rollouts(rank, world_size),
        "broken": broken_rollouts(rank, world_size),
        "sampled": sampled_rollouts(rank, world_size),
    }


@pytest.fixture(scope="module")
def two_ranks():
    return run_distributed(rank_work, 2)


# 9


def test_eval_and_train_return_the_engine():
    """DeepSpeed's `eval()` and `train()` return None."""
    config = {"train_batch_size": 1}
    reference = hybrid_engine.initialize(model=build_model(), config=config)[0]
    critic = hybrid_engine.initialize(model=build_model(), config=config | {"optimizer": {"type": "AdamW"}})[0]
    for engine in (build_engine(build_model()), critic, reference):
        assert engine.eval() is engine and not engine.module.training
        assert engine.train() is engine and engine.module.training
        assert engine.train(False) is engine and not engine.module.training


# 10


@pytest.mark.parametrize("is_released", [False, True])
def test_batches_may_grow_and_shrink_in_every_dimension_from_call_to_call(is_released):
    """DeepSpeed sizes its workspace once, from the first batch, and fails at a larger one."""
    input_ids, mask = padded_prompts()
    engine = build_engine(build_model(), release_inference_cache=is_released).eval()
    model, held = build_model(), []
    for num_prompts, width, num_tokens in [(1, 4, 2), (6, 4, 2), (6, 9, 2), (6, 9, 40), (1, 9, 200), (2, 3, 1)]:
        batch, options = input_ids[:num_prompts, -width:], GREEDY | {"max_new_tokens": num_tokens}
        options["attention_mask"] = mask[:num_prompts, -width:]
        held.append(engine.generator.workspace.allocated_bytes)
        assert torch.equal(engine.generate(batch, **options), model.generate(batch, **options))
    assert max(held) > 0 if not is_released else max(held) == 0


# 11

_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD}
_SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB, **_IDS}
_GPT = {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, **_IDS}
_BLOOM = {"hidden_size": 48, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, **_IDS}

# Model, config, sizes, and what the config says against what DeepSpeed takes.
SETTINGS = {
    "OPT's ReLU": ("OPTForCausalLM", "OPTConfig", _SIZES, {"activation_function": "relu"}, "gelu"),
    "OPT's GELU": ("OPTForCausalLM", "OPTConfig", _SIZES, {"activation_function": "gelu"}, "relu"),
    "GPT-2's eps": ("GPT2LMHeadModel", "GPT2Config", _GPT, {"layer_norm_epsilon": 0.1}, 1e-5),
    "GPT-J's eps": ("GPTJForCausalLM", "GPTJConfig", _GPT | {"rotary_dim": 8}, {"layer_norm_epsilon": 0.1}, 1e-5),
    "GPT-NeoX's eps": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES, {"layer_norm_eps": 0.1}, 1e-5),
    "BLOOM's eps": ("BloomForCausalLM", "BloomConfig", _BLOOM, {"layer_norm_epsilon": 0.1}, 1e-5),
    "Falcon's eps": ("FalconForCausalLM", "FalconConfig", _SIZES, {"layer_norm_epsilon": 0.1}, 1e-5),
    "GPT-NeoX one after another": (
        "GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES, {"use_parallel_residual": False}, True,
    ),
    "GPT-NeoX in parallel": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES, {"use_parallel_residual": True}, False),
}  # fmt: skip


def build_setting(name, is_other=False):
    """A model as the config says, or with the other value and the same weights."""
    model, config, sizes, setting, other = SETTINGS[name]
    setting = dict.fromkeys(setting, other) if is_other else setting
    return randomised(lambda: getattr(hf, model)(getattr(hf, config)(**sizes, **setting)))


@pytest.mark.parametrize("name", SETTINGS)
def test_activation_eps_and_order_of_a_layer_are_those_of_the_config(name):
    """DeepSpeed's OPT is always ReLU, its LayerNorm has eps 1e-5, and GPT-NeoX ignores use_parallel_residual=False."""
    input_ids, mask = padded_prompts()
    engine, model = build_engine(build_setting(name)).eval(), build_setting(name)
    output = engine.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(output.sequences, model.generate(input_ids, attention_mask=mask, **GREEDY))
    expected = module_logprobs(model, output.sequences, mask).float()
    torch.testing.assert_close(output.logprobs, expected, atol=1e-5, rtol=0)
    other = module_logprobs(build_setting(name, is_other=True), output.sequences, mask)
    assert (other - expected).abs().max() > 0.01


# 12


def _with_peft_dropout(model):
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "lora_dropout": 0.5}
    return get_peft_model(model, LoraConfig(r=3, init_lora_weights=False, **options))


DROPOUTS = {
    "of the model": lambda: randomised(
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**_GPT, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5))
    ),
    "of attention": lambda: randomised(
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES, intermediate_size=80, attention_dropout=0.5))
    ),
    "of the script's adapters": lambda: randomise_adapters(replace_linears(build_model(), dropout=0.5)),
    "of peft's adapters": lambda: _with_peft_dropout(build_model()),
}


@pytest.mark.parametrize("kind", DROPOUTS)
def test_old_logprobs_are_without_dropout_in_eval_mode_and_with_it_in_training_mode_as_the_docs_warn(kind):
    """DeepSpeed-Chat computes old log-probabilities after `train()`, with dropout, and says nothing."""
    input_ids, mask = padded_prompts()
    actor = build_engine(DROPOUTS[kind]())
    reference = hybrid_engine.initialize(model=DROPOUTS[kind]().train(), config={"train_batch_size": 1})[0]
    rollout = actor.eval().generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
    sequences = rollout.sequences
    for engine in (actor, reference):
        logprobs = module_logprobs(engine.eval(), sequences, mask)
        assert torch.equal(module_logprobs(engine, sequences, mask), logprobs)
        torch.testing.assert_close(rollout.logprobs, logprobs.float(), atol=5e-5, rtol=0)
    actor.train()
    dropped = [module_logprobs(actor, sequences, mask) for _ in range(2)]
    assert (dropped[0] - logprobs).abs().max() > 0.01
    assert (dropped[0] - dropped[1]).abs().max() > 0.01
    page = (DOCS / "ppo.md").read_text()
    assert "`engine.train()` switches it on for every forward pass until `engine.eval()`" in page
