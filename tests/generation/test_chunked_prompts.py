"""Long prompts are fed in chunks beside which others decode, and no sample changes by it."""

from functools import partial
from itertools import pairwise

import pytest
import torch

from hybrid_engine.containers import InferenceModel
from hybrid_engine.generation import step
from hybrid_engine.generation.core import Prompt, Sequence
from hybrid_engine.generation.live.opening import live_batch
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.ops import MixedBatch, PrefillBatch
from tests.generation.test_mixed_turns import CUDA
from tests.generation.test_mixed_turns import build as build_engine
from tests.support.models import PAD

pytestmark = pytest.mark.gpu
# Equal prompts share nothing, so that every chunk is computed.
build = partial(build_engine, max_running=3, prefix_cache=False)
CHUNK = 4
LENGTHS = [3, 11, 2, 9, 4, 17]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    for name in ("CHUNK_TOKENS", "CHUNK_TOKENS_ON_CPU"):
        monkeypatch.setattr(step, name, CHUNK)


def prompts(device, repeats=2):
    """Left-padded prompts, most of them longer than a chunk, and their mask."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor(LENGTHS * repeats)
    mask = torch.arange(max(LENGTHS)) >= max(LENGTHS) - lengths[:, None]
    input_ids = torch.randint(3, 99, mask.shape, generator=generator)
    return torch.where(mask, input_ids, PAD).to(device), mask.long().to(device)


def rollout(engine, mixes, **options):
    engine.generator.native.mixes = mixes
    input_ids, mask = prompts(engine.device)
    options = {"max_new_tokens": 13, "do_sample": True, "top_k": 0, "pad_token_id": PAD, "seed": 5} | options
    # Rows end at different turns, or all would leave and enter together.
    options = {"eos_token_id": list(range(3, 99, 8))} | options
    return engine.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **options)


class Passes:
    """What each pass over the layers fed: rows that decoded, and of each prompt the first and last token."""

    def __init__(self):
        self.fed = []

    def note(self, batch):
        """One pass."""
        rows, prefill = (0, batch) if isinstance(batch, PrefillBatch) else (len(batch.tokens), None)
        if isinstance(batch, MixedBatch):
            rows, prefill = len(batch.decode.tokens), batch.prefill
        chunks = []
        if prefill is not None:
            lasts = prefill.lengths if prefill.context is None else prefill.context.lengths
            chunks = [(last - length, last) for length, last in zip(prefill.lengths, lasts, strict=True)]
        self.fed.append((rows, chunks))

    @property
    def pure(self):
        """Prefills of passes in which nobody decoded."""
        return [chunks for rows, chunks in self.fed if chunks and not rows]

    @property
    def continued(self):
        """Chunks of prompts of which a part was fed in an earlier pass."""
        return [chunk for _, chunks in self.fed for chunk in chunks if chunk[0] > 0]


@pytest.fixture
def passes(monkeypatch):
    found, forward = Passes(), InferenceModel.forward

    def noting(model, batch, *args):
        found.note(batch)
        return forward(model, batch, *args)

    monkeypatch.setattr(InferenceModel, "forward", noting)
    return found


def assert_unchanged(engine, passes, **options):
    """Equal to a rollout that prefills whole prompts while nobody decodes."""
    expected = rollout(engine, False, **options)
    assert passes.continued == []
    num_pure = len(passes.pure)
    passes.fed.clear()
    found = rollout(engine, True, **options)
    assert passes.continued and len(passes.pure) < num_pure
    assert all(last - first <= CHUNK for rows, chunks in passes.fed if rows for first, last in chunks)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.finish_reason == expected.finish_reason
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)


OPTIONS = {
    "sampled": {},
    "groups sharing blocks": {"num_return_sequences": 3},
    "a repetition penalty": {"repetition_penalty": 1.7},
    "rules that read the tokens": {"no_repeat_ngram_size": 2},
    "rows that differ": {"row_options": [{}, {"do_sample": False}, {"top_k": 3}, {"max_new_tokens": 2}] * 3},
}


@pytest.mark.parametrize("is_recorded", [False, True], ids=["as they come", "recorded and read late"])
@pytest.mark.parametrize("name", OPTIONS)
def test_samples_are_those_of_whole_prompts(passes, name, is_recorded):
    assert_unchanged(build(is_recorded=is_recorded), passes, **OPTIONS[name])


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mistral-window", "gemma2", "mixtral", "qwen3-qk-norm"])
def test_greedy_tokens_are_those_of_transformers(passes, family):
    engine = build(family)
    passes.fed.clear()
    lengths = [13, 5, 9, 7, 11, 6] * 2
    row_options = [{"max_new_tokens": length} for length in lengths]
    found = rollout(engine, True, do_sample=False, eos_token_id=None, row_options=row_options).sequences
    assert passes.continued
    assert len(passes.pure) == 1, "nothing runs before the first"
    input_ids, mask = prompts(engine.device)
    expected = engine.module.generate(
        input_ids, attention_mask=mask, max_new_tokens=13, do_sample=False, eos_token_id=None, pad_token_id=PAD
    )
    for row, length in enumerate(lengths):
        end = input_ids.shape[1] + length
        assert found[row, :end].tolist() == expected[row, :end].tolist()


@pytest.mark.parametrize("is_recorded", [False, True], ids=["as they come", "recorded and read late"])
def test_who_is_half_prefilled_begins_anew_where_others_need_the_blocks(passes, is_recorded):
    engine = build(is_recorded=is_recorded, max_kv_blocks=11)
    assert_unchanged(engine, passes, eos_token_id=None)
    chunks = [chunk for _, chunks in passes.fed for chunk in chunks]
    given_up = [later for chunk, later in pairwise(chunks) if later[0] == 0 and chunk[0] == 0]
    assert given_up, "nobody lost what was fed"
    assert engine.latency_stats()["preemptions"] > 0


def test_responses_that_are_prefilled_again_come_in_chunks_too(passes):
    engine = build(max_kv_blocks=16, max_running=6)
    assert_unchanged(engine, passes, num_return_sequences=2, eos_token_id=None, max_new_tokens=24)
    assert engine.latency_stats()["preemptions"] > 0
    assert max(last for _, last in passes.continued) > max(LENGTHS)


def test_one_block_for_each_sequence(passes):
    assert_unchanged(build(kv_block_size=32), passes, num_return_sequences=2)


def test_adapters(passes):
    assert_unchanged(build(has_lora=True), passes)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_in_exact_mode_log_probabilities_keep_their_bits(family, monkeypatch):
    engine, passes = build(family, exact=True), Passes()
    expected = rollout(engine, False)
    model = type(engine.generator.model)
    forward = model.forward

    def noting(self, batch, *args):
        passes.note(batch)
        return forward(self, batch, *args)

    monkeypatch.setattr(model, "forward", noting)
    found = rollout(engine, True)
    assert passes.continued
    assert torch.equal(found.sequences, expected.sequences) and torch.equal(found.logprobs, expected.logprobs)


def sequences_of(lengths, **options):
    generator = torch.Generator().manual_seed(2)
    options = GenerationOptions(**({"max_new_tokens": 9} | options))
    drawn = [torch.randint(3, 99, (length,), generator=generator).tolist() for length in lengths]
    return [Sequence(Prompt(tokens), index, options) for index, tokens in enumerate(drawn)]


def answers(engine, sequences):
    """Greedy answers of each sequence alone."""
    given = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    found = {}
    for sequence in sequences:
        input_ids = torch.tensor([sequence.prompt.tokens], device=engine.device)
        found[sequence.row] = engine.generate(input_ids, **given)[0, input_ids.shape[1] :].tolist()
    return found


def test_one_that_leaves_half_prefilled_gives_back_what_it_had(passes):
    engine = build()
    short, long, later = sequences_of([3, 15, 7])
    expected, told = answers(engine, [short, later]), {0: [], 2: []}
    passes.fed.clear()
    with live_batch(engine.generator, 32, 3) as batch:
        batch.add([short])
        turn(batch, told)
        batch.add([long, later])
        turn(batch, told)
        turn(batch, told)
        assert passes.fed[1:] == [(1, [(0, 4)]), (1, [(4, 8)])]
        batch.cancel([long])
        while batch.has_work:
            turn(batch, told)
        assert batch.scheduler.pool.num_free == batch.scheduler.pool.num_blocks
    assert told == expected


def test_of_prompts_that_come_at_once_the_first_are_answered_before_the_last_are_fed(passes):
    """A rollout, in which nobody waits for a first token, feeds them in one pass, and so does a GPU."""
    engine = build()
    sequences = sequences_of([4, 4, 4])
    expected, told = answers(engine, sequences), {0: [], 1: [], 2: []}
    passes.fed.clear()
    with live_batch(engine.generator, 32, 3) as batch:
        batch.add(sequences)
        while batch.has_work:
            turn(batch, told)
    if CUDA:
        assert passes.fed[:2] == [(0, [(0, 4), (0, 4), (0, 4)]), (4, [])]  # a recorded step of four rows
    else:
        assert passes.fed[:3] == [(0, [(0, 4), (0, 4)]), (2, [(0, 4)]), (3, [])]
    assert told == expected


def turn(batch, told):
    """One turn, whose tokens are added to those of each row."""
    for progress in batch.turn():
        told[progress.sequence.row] += progress.tokens


def test_an_error_while_a_prompt_is_half_prefilled_leaves_the_next_rollout_as_it_was(monkeypatch):
    engine = build()
    expected = rollout(engine, True)
    forward, num_chunks = InferenceModel.forward, []

    def failing(model, batch, *args):
        if isinstance(batch, MixedBatch) and batch.prefill.context is not None:
            num_chunks.append(1)
            raise RuntimeError("out of luck")
        return forward(model, batch, *args)

    with monkeypatch.context() as patch:
        patch.setattr(InferenceModel, "forward", failing)
        with pytest.raises(RuntimeError, match="out of luck"):
            rollout(engine, True)
    assert num_chunks == [1]
    found = rollout(engine, True)
    assert torch.equal(found.sequences, expected.sequences) and torch.equal(found.logprobs, expected.logprobs)


def test_a_conversation_goes_on_from_what_was_kept_in_chunks(passes):
    engine = build()
    first, other = sequences_of([5, 3])
    first.is_kept = True
    told = {0: [], 1: [], 2: []}
    with live_batch(engine.generator, 40, 3) as batch:
        batch.add([first])
        while batch.has_work:
            turn(batch, told)
        (new,) = sequences_of([10])
        prompt = Prompt(first.prompt.tokens + first.tokens + new.prompt.tokens)
        following = Sequence(prompt, 2, new.options, begins_from=first)
        batch.add([other])
        turn(batch, told)
        passes.fed.clear()
        batch.add([following])
        while batch.has_work:
            turn(batch, told)
    num_fed = len(prompt.tokens) - 11  # the last token drawn was not
    chunks = [chunk for _, chunks in passes.fed for chunk in chunks]
    assert chunks == [(num_fed, num_fed + 4), (num_fed + 4, num_fed + 8), (num_fed + 8, num_fed + 11)]
    assert all(rows > 0 for rows, chunks in passes.fed[:3])
    assert {2: told[2], 1: told[1]} == answers(engine, [following, other])
