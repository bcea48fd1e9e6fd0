"""Prompts that begin alike share keys and values, and no sample changes by it."""

import pytest
import torch

import hybrid_engine
from hybrid_engine.generation.core import Prompt, Sequence
from hybrid_engine.generation.live.opening import live_batch
from hybrid_engine.generation.options import GenerationOptions
from tests.generation.test_mixed_turns import build as build_engine
from tests.support.models import PAD, build_model

pytestmark = pytest.mark.gpu
COMMON = 13
LENGTHS = [17, 5, 21, 14, 17, 30]
SAMPLED = {"do_sample": True, "top_k": 0, "eos_token_id": list(range(3, 99, 8))}


def prompts(device):
    """Left-padded prompts with the same first tokens, and their mask."""
    generator = torch.Generator().manual_seed(1)
    common = torch.randint(3, 99, (COMMON,), generator=generator)
    rows = [torch.cat([common, torch.randint(3, 99, (30,), generator=generator)])[:length] for length in LENGTHS]
    width = max(LENGTHS)
    mask = torch.arange(width) >= width - torch.tensor(LENGTHS)[:, None]
    input_ids = torch.full((len(rows), width), PAD)
    input_ids[mask] = torch.cat(rows)
    return input_ids.to(device), mask.long().to(device)


def rollout(engine, **options):
    input_ids, mask = prompts(engine.device)
    options = {"max_new_tokens": 13, "pad_token_id": PAD, "seed": 5} | options
    return engine.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **options)


def both(family="llama", engine_options=None, **options):
    """The rollout without and with the cache, and the statistics of the second one."""
    found = []
    for is_on in (False, True):
        engine = build_engine(family, prefix_cache=is_on, **(engine_options or {}))
        found.append(rollout(engine, **options))
        stats = engine.latency_stats()
        assert bool(stats["reused_tokens"]) == is_on
    return *found, stats


WORKSPACES = {
    "roomy": ({}, {}),
    "groups": ({}, {"num_return_sequences": 3}),
    "preempted": ({"max_kv_blocks": 19}, {"num_return_sequences": 2, "eos_token_id": None}),
    "one at a time": ({"max_kv_blocks": 12, "max_running": 1}, {}),
    "one block of a prompt": ({"kv_block_size": 12}, {}),
}


@pytest.mark.parametrize("name", WORKSPACES)
def test_in_exact_mode_log_probabilities_keep_their_bits(name):
    workspace, options = WORKSPACES[name]
    expected, found, stats = both(engine_options=workspace | {"exact": True}, **SAMPLED | options)
    assert torch.equal(found.sequences, expected.sequences) and torch.equal(found.logprobs, expected.logprobs)
    assert found.finish_reason == expected.finish_reason
    assert (stats["preemptions"] > 0) == (name == "preempted")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral-window", "gemma2", "mixtral", "deepseek-v3", "gemma4"])
def test_greedy_tokens_are_those_of_transformers(family):
    model = build_model(family)
    input_ids, mask = prompts("cpu")
    greedy = {"max_new_tokens": 13, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    expected = model.generate(input_ids, attention_mask=mask, **greedy)
    _, found, _ = both(family, {"max_kv_blocks": 25}, **greedy)
    assert found.sequences.tolist() == expected.tolist()


def greedy(tokens, row):
    return Sequence(Prompt(tokens), row, GenerationOptions(max_new_tokens=7))


def answer(batch, sequences):
    """The tokens of each sequence, which join together; and the number of tokens that were reused."""
    before, told = batch.kv_blocks.num_reused_tokens, {sequence.row: [] for sequence in sequences}
    batch.add(sequences)
    while batch.has_work:
        for progress in batch.turn():
            told.setdefault(progress.sequence.row, []).extend(progress.tokens)
    return list(told.values()), batch.kv_blocks.num_reused_tokens - before


def alone(engine, prompt):
    """The greedy answer by transformers."""
    input_ids = torch.tensor([prompt], device=engine.device)
    options = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    options["attention_mask"] = torch.ones_like(input_ids)
    return type(engine.module).generate(engine.module, input_ids, **options)[0, len(prompt) :].tolist()


def test_requests_of_a_live_batch_find_what_earlier_ones_left_until_the_weights_change():
    engine = build_engine(max_running=3)
    common = list(range(3, 16))
    several = [[*common, 40 + row, 41, 42] for row in range(4)]
    with live_batch(engine.generator, 32, 3) as batch:
        assert answer(batch, [greedy(several[0], 0)]) == ([alone(engine, several[0])], 0)
        expected = [alone(engine, prompt) for prompt in several]
        assert answer(batch, [greedy(prompt, row) for row, prompt in enumerate(several)]) == (expected, 12 * 4)
        usage = batch.kv_blocks
        assert usage.used == 0 and usage.kept > 0 and usage.num_prompt_tokens == 5 * 16
    with torch.no_grad():
        engine.module.lm_head.weight.neg_()
    with live_batch(engine.generator, 32, 3) as batch:
        changed = [alone(engine, several[0])]
        assert changed != expected[:1]
        assert answer(batch, [greedy(several[0], 0)]) == (changed, 0)


def test_a_prompt_fed_in_chunks_is_found_by_those_that_wait_behind_it(monkeypatch):
    monkeypatch.setattr("hybrid_engine.generation.step.CHUNK_TOKENS_ON_CPU", 8)
    monkeypatch.setattr("hybrid_engine.generation.step.CHUNK_TOKENS", 8)
    engine = build_engine(max_running=4)
    common = list(range(3, 25))
    several = [[9, 9, 9], *([*common, 40 + row] for row in range(3))]
    expected = [alone(engine, prompt) for prompt in several]
    with live_batch(engine.generator, 40, 4) as batch:
        batch.add([greedy(several[0], 0)])
        first = batch.turn()[0].tokens
        found, reused = answer(batch, [greedy(prompt, row) for row, prompt in enumerate(several) if row])
    assert reused == 2 * 20
    assert found == [*expected[1:], expected[0][1:]] and first == expected[0][:1]


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("llama", {"prefix_cache": False}, "hybrid_engine.prefix_cache is false"),
        ("lfm2", {}, "layers keep a state per sequence"),
        ("llama", {"exact": True, "kv_block_size": 0}, "in exact mode each sequence is one block"),
    ],
)
def test_the_report_says_why_prefixes_are_not_shared(family, options, reason):
    engine = build_engine(family, **options)
    assert reason in engine.report()
    rollout(engine, do_sample=False)
    assert engine.latency_stats()["reused_tokens"] == 0


def test_what_a_mixture_routes_is_recorded_for_all_tokens():
    engine = build_engine("mixtral")
    expected = rollout(build_engine("mixtral", prefix_cache=False), record_routing=True, **SAMPLED)
    found = rollout(engine, record_routing=True, **SAMPLED)
    assert all(map(torch.equal, found.routing, expected.routing))


def test_an_option_that_is_no_flag_is_refused():
    with pytest.raises(ValueError, match=r"hybrid_engine\.prefix_cache"):
        hybrid_engine.initialize(
            model=build_model("llama"),
            config={"train_batch_size": 1, "hybrid_engine": {"enabled": True, "prefix_cache": "yes"}},
        )
