"""Layers that keep a state per sequence: chunks, forks, preemption and kept conversations change no sample.

Log-probabilities are compared with those of one forward pass of the model itself over each whole sequence.
"""

import re

import pytest
import torch

import hybrid_engine
from hybrid_engine.containers import InferenceModel
from hybrid_engine.generation import step
from hybrid_engine.generation.core import Prompt, Sequence
from hybrid_engine.generation.live.opening import live_batch
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.ops import MixedBatch
from hybrid_engine.ops.short_conv import ShortConvOp
from tests.generation.test_mixed_turns import build
from tests.support.models import PAD, build_model, module_logprobs, padded_prompts, randomised

STATEFUL = {"lfm2": "ShortConv", "qwen3.5": "GatedDeltaNet", "granite4": "StateSpace"}
"""The mixer that keeps a state, by family."""
LATE = pytest.mark.parametrize("is_recorded", [False, True], ids=["as they come", "recorded and read late"])
GREEDY = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}


@pytest.fixture
def small_chunks(monkeypatch):
    """Prompts of more than four tokens are fed in chunks."""
    for name in ("CHUNK_TOKENS", "CHUNK_TOKENS_ON_CPU"):
        monkeypatch.setattr(step, name, 4)


def roll_out(engine, **options):
    """Groups of three samples; returns them after their log-probabilities were compared with the model's own."""
    input_ids, mask = (tensor.repeat(2, 1) for tensor in padded_prompts(width=13))
    given = {"max_new_tokens": 11, "do_sample": True, "top_k": 0, "pad_token_id": PAD, "seed": 5}
    given |= {"num_return_sequences": 3, "eos_token_id": list(range(3, 99, 8)), "return_dict_in_generate": True}
    output = engine.generate(input_ids, attention_mask=mask, **given | options)
    own = module_logprobs(engine.module, output.sequences, mask.repeat_interleave(3, 0)).float()
    is_drawn = torch.arange(own.shape[1]) < output.lengths[:, None]
    torch.testing.assert_close(output.logprobs[is_drawn], own[is_drawn], atol=1e-5, rtol=0)
    return output


@LATE
# Layers that share keys and values, that have keys and a state, and scans of Mamba-1.
@pytest.mark.parametrize("family", [*STATEFUL, "gemma4", "falcon-h1", "jamba"])
def test_samples_are_the_models_own_whatever_is_chunked_forked_and_preempted(
    small_chunks, monkeypatch, family, is_recorded
):
    expected = roll_out(build(family, max_running=64))
    engine = build(family, max_running=5, max_kv_blocks=16, is_recorded=is_recorded)
    contexts, forward = [], InferenceModel.forward

    def noting(model, batch, *rest):
        contexts.append(batch.prefill.context if isinstance(batch, MixedBatch) else None)
        return forward(model, batch, *rest)

    monkeypatch.setattr(InferenceModel, "forward", noting)
    found = roll_out(engine)
    assert torch.equal(found.sequences, expected.sequences)
    assert any(contexts), "no chunk went on from another"
    roll_out(engine, eos_token_id=None)
    assert engine.latency_stats()["preemptions"] > 0


def answer(engine, tokens):
    """The greedy answer to one prompt."""
    return engine.generate(torch.tensor([tokens]), **GREEDY)[0, len(tokens) :].tolist()


@LATE
@pytest.mark.parametrize("family", STATEFUL)
@pytest.mark.parametrize(
    "ends", [(), tuple(range(3, 99, 4))], ids=["at full length", "at an end, which may be read late"]
)
def test_a_conversation_goes_on_from_its_state_or_is_fed_again(family, is_recorded, ends):
    engine = build(family, is_recorded=is_recorded)
    options = GenerationOptions(max_new_tokens=9, eos_token_ids=ends)
    first = Sequence(Prompt(list(range(5, 16))), 0, options, is_kept=True)
    with live_batch(engine.generator, 48, 3) as batch:
        run(batch, first)
        assert first.state_slot >= 0 and first in batch.scheduler.kept.sequences
        said = first.prompt.tokens + first.tokens
        # One that needs the state from before its end, and one that goes on from it.
        shorter = Sequence(Prompt([*said[:-3], 7, 9]), 1, options)
        following = Sequence(Prompt([*said, 50, 51]), 2, options, is_kept=True, begins_from=first)
        run(batch, shorter)
        num_fed = []
        batch.scheduler._starts.num_to_prefill, count = (
            lambda sequence: num_fed.append(count(sequence)) or num_fed[-1],
            batch.scheduler._starts.num_to_prefill,
        )
        run(batch, following)
        assert num_fed[-1] in (2, 3), "it was fed from its first token on"
        assert len(batch.scheduler.states.free) == batch.scheduler.states.num_slots - 1
    for sequence in (first, shorter, following):
        wanted = answer(engine, sequence.prompt.tokens)
        end = next((place for place, token in enumerate(wanted) if token in ends), len(wanted) - 1)
        assert sequence.tokens == wanted[: end + 1]


def run(batch, sequence):
    """Takes turns until `sequence` has its answer."""
    batch.add([sequence])
    while batch.has_work:
        batch.turn()


@pytest.mark.parametrize("family", STATEFUL)
def test_kept_conversations_give_their_slots_to_those_that_wait(family):
    engine = build(family)
    options = GenerationOptions(max_new_tokens=3)
    with live_batch(engine.generator, 48, 2) as batch:
        sequences = [Sequence(Prompt([row + 3] * 5), row, options, is_kept=True) for row in range(12)]
        for sequence in sequences:
            run(batch, sequence)
        states = batch.scheduler.states
        kept = [sequence.state_slot for sequence in batch.scheduler.kept.sequences]
        assert 1 < len(kept) < 12 and sorted([*kept, *states.free]) == list(range(states.num_slots))
    assert [row.tokens for row in sequences] == [answer(engine, row.prompt.tokens)[:3] for row in sequences]


@pytest.mark.parametrize("family", STATEFUL)
def test_a_state_that_does_not_fit_is_an_error_and_one_that_fits_alone_runs_alone(family, monkeypatch):
    engine = build(family)
    model = engine.generator.model
    slot, block = model.bytes_per_slot(), model.bytes_per_block(4)
    wanted = f"needs 2 state slots of {slot:,} bytes and 7 KV blocks of 4 tokens"
    free = 2 * slot + 7 * block
    monkeypatch.setattr(engine.generator.memory, "spare_bytes", lambda model: free - 1)
    with pytest.raises(ValueError, match=re.escape(wanted)):
        roll_out(engine)
    monkeypatch.setattr(engine.generator.memory, "spare_bytes", lambda model: free)
    roll_out(engine)
    assert engine.generator.workspace.allocated_bytes == free


@pytest.mark.parametrize("family", STATEFUL)
def test_memory_is_flat_over_rollouts_and_slots_are_counted_by_the_plan(family):
    engine = build(family, kv_block_size=0, release_inference_cache=False)
    input_ids, mask = padded_prompts()
    sizes = set()
    for seed in range(20):
        engine.generate(input_ids, attention_mask=mask, max_new_tokens=4, do_sample=True, seed=seed, pad_token_id=PAD)
        sizes.add((engine.generator.workspace.allocated_bytes, engine.generator.workspace.cache.data_ptr()))
    assert len(sizes) == 1
    model = engine.generator.model
    (taken, _), cache = sizes.pop(), engine.generator.workspace.cache
    assert taken == cache.num_slots * model.bytes_per_slot() + cache.num_blocks * model.bytes_per_block(
        cache.block_size
    )


@pytest.mark.parametrize("family", STATEFUL)
def test_exact_mode_is_refused_by_name(family):
    refusal = rf"hybrid_engine.exact: its layers keep a state per sequence \({STATEFUL[family]}\)"
    with pytest.raises(ValueError, match=refusal):
        build(family, exact=True)


def test_a_lost_state_is_noticed_at_start_up(monkeypatch):
    convolve = ShortConvOp.__call__

    def forgetting(op, input, weight, bias, states, batch):
        return convolve(op, input, weight, bias, states.zero_(), batch)

    monkeypatch.setattr(ShortConvOp, "__call__", forgetting)
    assert "containers and the model's forward disagree" in build("lfm2").generator.fallback_reason


def test_the_biases_of_a_convolution_are_added():
    def biased():
        config = build_model("lfm2").config
        config.conv_bias = True
        return randomised(lambda: type(build_model("lfm2"))(config))

    model = biased()
    engine = hybrid_engine.init_inference(model)
    assert engine.generator.fallback_reason is None and engine.generator.logprob_difference.max < 1e-5
    assert answer(engine, [5, 6, 7, 8]) == answer(biased(), [5, 6, 7, 8])
