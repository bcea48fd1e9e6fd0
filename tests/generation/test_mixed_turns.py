"""What runs decodes in the pass that prefills newcomers, and no sample changes by it."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

import hybrid_engine
from hybrid_engine.containers import InferenceModel
from hybrid_engine.generation.core import Prompt, Sequence
from hybrid_engine.generation.live.opening import live_batch
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.ops import MixedBatch, cpu_kernels, linears
from tests.support.models import PAD, build_model, module_logprobs, padded_prompts
from tests.support.tape import TapeRecorder

pytestmark = pytest.mark.gpu
CUDA = torch.cuda.is_available()


def build(family="llama", has_lora=False, is_recorded=False, **options):
    model = build_model(family)
    if has_lora:
        model = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    block = {"enabled": True, "max_out_tokens": 64, "kv_block_size": 4, "max_running": 4} | options
    engine, *_ = hybrid_engine.initialize(model=model, config={"train_batch_size": 1, "hybrid_engine": block})
    native = engine.generator.native
    if is_recorded and not CUDA:
        native.steps.recorder, native.lag = TapeRecorder(), 1
    return engine.eval()


def rollout(engine, mixes, **options):
    """Samples of prompts that do not all fit at once, so that some enter while others decode."""
    engine.generator.native.mixes = mixes
    input_ids, mask = (tensor.repeat(2, 1).to(engine.device) for tensor in padded_prompts())
    options = {"max_new_tokens": 13, "do_sample": True, "top_k": 0, "pad_token_id": PAD, "seed": 5} | options
    # Rows end at different turns, or all would leave and enter together.
    options = {"eos_token_id": list(range(3, 99, 8))} | options
    return engine.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **options)


@pytest.fixture
def passes(monkeypatch):
    """The rows that decoded in each mixed pass."""
    found, forward = [], InferenceModel.forward

    def counting(model, batch, *args):
        if isinstance(batch, MixedBatch):
            found.append(len(batch.decode.tokens))
        return forward(model, batch, *args)

    monkeypatch.setattr(InferenceModel, "forward", counting)
    return found


OPTIONS = {
    "sampled": {},
    "greedy": {"do_sample": False},
    "groups sharing blocks": {"num_return_sequences": 3},
    "a repetition penalty": {"repetition_penalty": 1.7},
    "rules that read the tokens": {"no_repeat_ngram_size": 2},
    "rows that differ": {"row_options": [{}, {"do_sample": False}, {"top_k": 3}, {"max_new_tokens": 2}] * 3},
}


def assert_unchanged(engine, passes, **options):
    expected = rollout(engine, False, **options)
    assert passes == []
    found = rollout(engine, True, **options)
    assert passes and min(passes) > 0
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.finish_reason == expected.finish_reason
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_recorded", [False, True], ids=["as they come", "recorded and read late"])
@pytest.mark.parametrize("name", OPTIONS)
def test_samples_are_those_of_turns_of_one_kind(passes, name, is_recorded):
    assert_unchanged(build(is_recorded=is_recorded), passes, **OPTIONS[name])


@pytest.mark.parametrize("is_recorded", [False, True], ids=["as they come", "recorded and read late"])
def test_sequences_that_are_preempted_are_recomputed_beside_others(passes, is_recorded):
    engine = build(is_recorded=is_recorded, max_kv_blocks=13)
    assert_unchanged(engine, passes, num_return_sequences=3, eos_token_id=None)
    assert engine.latency_stats()["preemptions"] > 0


@pytest.mark.parametrize("family", ["gpt2", "bloom", "mistral-window", "gemma2", "mixtral", "qwen3-qk-norm"])
def test_families(passes, family):
    assert_unchanged(build(family), passes)


def test_one_block_for_each_sequence(passes):
    assert_unchanged(build(kv_block_size=32), passes, num_return_sequences=2)


def test_adapters(passes):
    assert_unchanged(build(has_lora=True), passes)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_in_exact_mode_log_probabilities_keep_their_bits(family, monkeypatch):
    engine = build(family, exact=True)
    expected = rollout(engine, False)
    mixed = []
    forward = type(engine.generator.model).forward

    def counting(model, batch, *args):
        mixed.append(isinstance(batch, MixedBatch))
        return forward(model, batch, *args)

    monkeypatch.setattr(type(engine.generator.model), "forward", counting)
    found = rollout(engine, True)
    assert any(mixed)
    assert torch.equal(found.sequences, expected.sequences) and torch.equal(found.logprobs, expected.logprobs)


def test_a_batch_that_sequences_join_while_it_runs_hands_on_every_token(passes):
    engine, told = build(), {}
    options = GenerationOptions(max_new_tokens=9)
    input_ids, mask = padded_prompts()
    given = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    expected = engine.generate(input_ids.to(engine.device), attention_mask=mask.to(engine.device), **given)
    passes.clear()
    with live_batch(engine.generator, 32, 6) as batch:
        waiting = [Sequence(Prompt(row[kept.bool()].tolist()), index, options) for index, (row, kept) in
                   enumerate(zip(input_ids, mask, strict=True))]  # fmt: skip
        while waiting or batch.has_work:
            if waiting:
                batch.add([waiting.pop(0)])
            for progress in batch.turn():
                told.setdefault(progress.sequence.row, []).extend(progress.tokens)
    assert passes[:3] == [1, 2, 3]
    assert [told[row] for row in range(6)] == expected[:, input_ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.skipif(CUDA, reason="rows are added for oneDNN, which multiplies on a CPU")
def test_long_passes_have_few_numbers_of_rows_and_the_same_results(monkeypatch, family):
    """oneDNN compiles and keeps functions for each number of rows."""
    monkeypatch.setattr(cpu_kernels, "is_intel", lambda: False)
    engine, multiplied, multiply = build(family, max_out_tokens=80, max_running=8), set(), linears.linear_transposed
    monkeypatch.setattr(
        linears, "linear_transposed", lambda input, *args: (multiplied.add(len(input)), multiply(input, *args))[1]
    )
    for length in (28, 29, 31):
        lengths = torch.arange(length - 6, length)
        mask = (torch.arange(length).flip(0) < lengths[:, None]).long()
        input_ids = torch.randint(3, 99, mask.shape).masked_fill(mask == 0, PAD)
        options = {"attention_mask": mask, "max_new_tokens": 3, "pad_token_id": PAD, "do_sample": False}
        output = engine.generate(input_ids, return_dict_in_generate=True, **options)
        assert torch.equal(output.sequences, engine.module.generate(input_ids, **options))
        own = module_logprobs(engine.module, output.sequences, mask)
        torch.testing.assert_close(output.logprobs.double(), own, atol=1e-4, rtol=1e-4)
    assert {rows for rows in multiplied if rows > 128} == {160, 192}  # of 147, 153 and 165 tokens
