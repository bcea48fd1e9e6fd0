"""Rollouts from sharded weights: every stage, gathered whole or streamed, one process and two."""

from functools import cache

import pytest
import torch
from peft import LoraConfig, get_peft_model

import hybrid_engine
from hybrid_engine.generation import output as rollout_output
from tests.support.distributed import run_distributed
from tests.support.models import BUILDERS, PAD, VOCAB, build_model, module_logprobs, padded_prompts, randomised
from tests.zero.test_startup_memory import deep_llama, layer_bytes

pytestmark = [pytest.mark.long, pytest.mark.torch_versions]

GREEDY = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": PAD, "eos_token_id": [7, 11, 23]}
FULL_LENGTH = {**GREEDY, "eos_token_id": None}
SAMPLED = {**GREEDY, "do_sample": True, "top_k": 0, "num_return_sequences": 2, "seed": 5}
SHORT = {**GREEDY, "max_new_tokens": 6}
SETTINGS = [(stage, pinned) for stage in (0, 1, 2, 3) for pinned in (True, False)]
# Below stage 3 the weights are whole in a rollout, whatever the stage: each family meets one of those.
FAMILIES = [(family, stage) for number, family in enumerate(BUILDERS) for stage in (number % 3, 3, "lora")]


def build_engine(model, world_size, stage, pinned=True):
    config = {
        "train_batch_size": 6,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "hybrid_engine": {"enabled": True, "pin_parameters": pinned, "max_running": 2},
    }
    engine, *_ = hybrid_engine.initialize(model=model, config=config)
    return engine


def share(tensor, rank, world_size):
    return tensor.chunk(world_size)[rank]


def weights(engine):
    from hybrid_engine.zero.sharding import full_tensor

    return {name: full_tensor(tensor).clone() for name, tensor in engine.module.state_dict().items()}


def same(a, b):
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def rollouts(rank, world_size):
    """For every setting: answers before and after a training step, and what happened to the weights."""
    torch.manual_seed(0)
    input_ids, mask = (share(tensor, rank, world_size) for tensor in padded_prompts())
    results = {}
    for stage, pinned in SETTINGS:
        engine = build_engine(build_model(), world_size, stage, pinned)
        before = weights(engine)
        engine.eval()
        result = {"native": engine.generator.fallback_reason is None, "report": engine.report()}
        result["greedy"] = engine.generate(input_ids, attention_mask=mask, **GREEDY)
        result["bytes"] = engine.latency_stats()["gathered_bytes"]
        result["sampled"] = engine.generate(input_ids, attention_mask=mask, **SAMPLED)
        result["scored"] = scored(engine, input_ids, mask) if stage == 3 else None
        result["unchanged"] = same(before, weights(engine))
        engine.train()
        engine.backward(engine(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss)
        engine.step()
        engine.eval()
        result["trained"] = engine.generate(input_ids, attention_mask=mask, **GREEDY)
        # A bound no 10 tokens reach: the option sends the same request to the model's own generate().
        result["own"] = engine.generate(input_ids, attention_mask=mask, encoder_no_repeat_ngram_size=500, **GREEDY)
        results[stage, pinned] = result
    return results


def scored(engine, input_ids, mask):
    """A rollout whose prompts are scored, each process's in as many passes as they are long."""
    real, rollout_output.MAX_LOGITS = rollout_output.MAX_LOGITS, 2 * VOCAB
    try:
        options = {**GREEDY, "prompt_logprobs": 2, "return_dict_in_generate": True}
        output = engine.generate(input_ids, attention_mask=mask, **options)
    finally:
        rollout_output.MAX_LOGITS = real
    return output.sequences, output.prompt_logprobs, output.prompt_top_tokens


def family_rollouts(rank, world_size):
    """For every family: answers from whole weights, from those of stage 3, and from those with LoRA."""
    input_ids, mask = (share(tensor, rank, world_size) for tensor in padded_prompts())
    results = {}
    for family, stage in FAMILIES:
        model = adapted(family) if stage == "lora" else build_model(family)
        engine = build_engine(model, world_size, 3 if stage == "lora" else stage)
        assert engine.generator.fallback_reason is None, family
        engine.eval()
        output = engine.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **SHORT)
        results[family, stage] = output.sequences, output.logprobs
    return results


def adapted(family):
    """peft's LoRA on every linear, with adapters that do something."""
    model = get_peft_model(build_model(family), LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    return model.eval()


def refused_inputs(rank, world_size):
    """Input that is bad on rank 1 alone is an error on both, and the next rollout works."""
    engine = build_engine(build_model(), world_size, 3)
    engine.eval()
    input_ids = torch.ones(3, 4, dtype=torch.int64)
    bad = torch.full((3, 4), 1000) if rank == 1 else input_ids
    try:
        engine.generate(bad, **GREEDY)
        message = ""
    except ValueError as error:
        message = str(error)
    engine.module.train(rank == 1)
    try:
        engine.generate(input_ids, **GREEDY)
        mode = ""
    except ValueError as error:
        mode = str(error)
    engine.module.eval()
    return message, engine.generate(input_ids, **GREEDY), mode


def crowded_rollouts(rank, world_size):
    """Pinned weights of six layers, of which rank 1 has room for five at most, with all the rest."""
    from hybrid_engine.generation import memory

    input_ids, mask = (share(tensor, rank, world_size) for tensor in padded_prompts())
    model = randomised(deep_llama)
    room = 10**12 if rank == 0 else 5 * layer_bytes(model)
    engine = build_engine(model, world_size, 3)
    engine.eval()
    real, memory.usable_memory_bytes = memory.usable_memory_bytes, lambda device: room
    try:
        answer = engine.generate(input_ids, attention_mask=mask, **GREEDY)
        report = engine.report()
    finally:
        memory.usable_memory_bytes = real
    engine.generate(input_ids, attention_mask=mask, **GREEDY)
    return answer, report, engine.report()


def failing_rollouts(rank, world_size):
    """A rollout that breaks off leaves no gathered weights behind; NaN on one rank is an error on both."""
    input_ids = torch.ones(3, 4, dtype=torch.int64)
    results = {}
    for pinned in (True, False):
        engine = build_engine(build_model(), world_size, 3, pinned)
        engine.eval()
        layer, passes = engine.generator.model.layers[0], []
        forward = layer.forward

        def fail(*args, passes=passes, forward=forward):
            passes.append(1)
            if len(passes) > 2:
                raise RuntimeError("power cut")
            return forward(*args)

        layer.forward = fail
        kept = None
        try:
            engine.generate(input_ids, **FULL_LENGTH)
        except RuntimeError as error:
            kept = error  # and with it the traceback, whose frames hold the abandoned stream
        del layer.forward
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(0.5)
        halved = build_model()
        with torch.no_grad():
            for parameter in halved.parameters():
                parameter.mul_(0.5)
        expected = halved.generate(input_ids, **FULL_LENGTH)
        results[pinned] = str(kept), torch.equal(engine.generate(input_ids, **FULL_LENGTH), expected)

    engine = build_engine(build_model(), world_size, 3)
    engine.eval()
    forward = engine.generator.model.forward
    if rank == 1:
        engine.generator.model.forward = lambda *args: forward(*args) * float("nan")
    try:
        engine.generate(input_ids, **FULL_LENGTH)
        results["nan"] = ""
    except RuntimeError as error:
        results["nan"] = str(error)
    return results


def lora_rollouts(rank, world_size):
    """LoRA under ZeRO-3, gathered and streamed."""
    import peft

    torch.manual_seed(0)
    input_ids, mask = (share(tensor, rank, world_size) for tensor in padded_prompts())
    results = []
    for pinned in (True, False):
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(build_model(), config)
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.15)
        engine = build_engine(model, world_size, 3, pinned)
        before = weights(engine)
        engine.eval()
        results.append(engine.generate(input_ids, attention_mask=mask, **GREEDY))
        results.append(same(before, weights(engine)))
    return results


def work(rank, world_size):
    parts = rollouts, lora_rollouts, refused_inputs, failing_rollouts, crowded_rollouts, family_rollouts
    return [part(rank, world_size) for part in parts]


@pytest.fixture(scope="module")
def two_processes():
    return run_distributed(work, 2)


@pytest.fixture(scope="module")
def one_process():
    return rollouts(0, 1), lora_rollouts(0, 1)


def joined(parts):
    """The ranks' rows under one another, padded to one width."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1]), value=PAD) for part in parts])


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"stage {s[0]} {'pinned' if s[1] else 'streamed'}")
def test_every_stage_answers_as_one_process_does(one_process, two_processes, setting):
    ours, alone = [part[0][setting] for part in two_processes], one_process[0][setting]
    input_ids, mask = padded_prompts()
    expected = build_model().generate(input_ids, attention_mask=mask, **GREEDY)
    assert all(part["native"] and part["unchanged"] for part in ours)
    assert torch.equal(joined([part["greedy"] for part in ours]), expected)
    assert torch.equal(joined([part["sampled"] for part in ours]), alone["sampled"])
    assert torch.equal(joined([part["trained"] for part in ours]), alone["trained"])
    assert not torch.equal(alone["trained"], expected)
    for part in ours:
        assert torch.equal(joined([part["own"]]), joined([part["trained"]]))


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "streamed"])
def test_prompts_are_scored_as_on_one_process(one_process, two_processes, pinned):
    alone = one_process[0][3, pinned]
    ours = [part[0][3, pinned] for part in two_processes]
    for part in ours:
        assert torch.equal(joined([part["scored"][0]]), joined([part["greedy"]]))
    logprobs, tops = (torch.cat([part["scored"][place] for part in ours]) for place in (1, 2))
    assert (logprobs != 0).any() and torch.equal(tops, alone["scored"][2])
    torch.testing.assert_close(logprobs, alone["scored"][1], atol=1e-5, rtol=0)


def test_pinned_weights_are_gathered_once_per_rollout_and_streamed_ones_on_every_pass(two_processes):
    num_bytes = sum(p.numel() * p.element_size() for p in build_model().parameters())
    pinned, streamed = two_processes[0][0][3, True], two_processes[0][0][3, False]
    assert pinned["bytes"] == num_bytes
    assert streamed["bytes"] > 5 * num_bytes
    assert "all layers once per rollout" in pinned["report"]
    assert "layer by layer" in streamed["report"]


@cache
def answers_of_the_model(family, has_lora):
    """What transformers generates, and the trainer's log-probabilities of that."""
    input_ids, mask = padded_prompts()
    model = adapted(family) if has_lora else build_model(family)
    expected = model.generate(input_ids=input_ids, attention_mask=mask, **SHORT)
    return expected, module_logprobs(model, expected, mask).float()


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(("family", "stage"), FAMILIES)
def test_every_family_answers_from_whole_and_sharded_weights_with_the_models_own_logprobs(two_processes, family, stage):
    """And at stage 3 with LoRA on every linear."""
    expected, trainer = answers_of_the_model(family, stage == "lora")
    sequences, logprobs = zip(*(part[5][family, stage] for part in two_processes), strict=True)
    assert torch.equal(joined(sequences), expected)
    ours = joined(logprobs)
    is_response = ours != 0
    apart, allowed = float((ours - trainer)[is_response].abs().max()), 1e-5
    if apart > allowed:  # no more than the model's own forward is from itself in fp64
        model = adapted(family) if stage == "lora" else build_model(family)
        exact = module_logprobs(model.double(), expected, padded_prompts()[1]).float()
        allowed = float((exact - trainer)[is_response].abs().max())
    assert apart <= allowed
    assert is_response.sum() > len(expected)


def test_lora_is_fused_under_stage_3_and_the_weights_stay_as_they_were(one_process, two_processes):
    alone = one_process[1][0]
    for index in (0, 2):
        assert torch.equal(joined([part[1][index] for part in two_processes]), alone)
        assert all(part[1][index + 1] for part in two_processes)


def test_input_that_is_bad_on_one_rank_is_refused_on_all(two_processes):
    (message_0, answer_0, mode_0), (message_1, answer_1, mode_1) = (part[2] for part in two_processes)
    assert mode_0 == f"rank 1: {mode_1}" and "training mode" in mode_1
    assert message_0.startswith("rank 1: input_ids[0, 0]=1000")
    assert message_1.startswith("input_ids[0, 0]=1000")
    assert torch.equal(answer_0, answer_1)


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "streamed"])
def test_a_rollout_that_breaks_off_leaves_no_gathered_weights_behind(two_processes, pinned):
    for part in two_processes:
        assert part[3][pinned] == ("power cut", True)


def test_logits_that_are_not_finite_on_one_rank_are_an_error_on_all(two_processes):
    assert all("not finite" in part[3]["nan"] for part in two_processes)


def test_pinned_weights_that_do_not_fit_on_one_rank_are_streamed_on_all_until_they_fit_again(two_processes):
    input_ids, mask = padded_prompts()
    expected = randomised(deep_llama).generate(input_ids, attention_mask=mask, **GREEDY)
    assert torch.equal(joined([part[4][0] for part in two_processes]), expected)
    for part in two_processes:
        assert "because the whole weights do not fit" in part[4][1]
        assert "all layers once per rollout" in part[4][2]
