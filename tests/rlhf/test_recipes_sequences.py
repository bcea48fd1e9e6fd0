"""Padded prompts and responses: what a model says about a response does not depend on what is padded around it."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from hybrid_engine.rlhf.algorithms import PolicyBatch
from hybrid_engine.rlhf.batches.passes import RunPasses
from hybrid_engine.rlhf.batches.sequences import (
    attach_responses,
    batches_of_similar_length,
    build_sequences,
    in_parts,
    last_token_scores,
    response_logprobs,
    response_values,
)
from hybrid_engine.rlhf.experience.policy import Experience, present_batch
from hybrid_engine.rlhf.options.algorithm import Algorithm
from hybrid_engine.rlhf.rewards.learned import load_value_model
from tests.support.distributed import run_distributed

pytestmark = pytest.mark.quick

PAD = 0
PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12], [13]]
RESPONSES = [[14, 1], [15, 16, 17, 18, 1], [1]]
CPU = torch.device("cpu")


def small_config():
    torch.manual_seed(0)
    return LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, pad_token_id=PAD, eos_token_id=1, num_labels=1,
    )  # fmt: skip


def test_an_update_takes_the_entropy_of_the_distributions_where_a_bonus_is_on_it_and_else_estimates_it():
    model = LlamaForCausalLM(small_config()).eval()
    sequences = build_sequences(PROMPTS, RESPONSES, PAD, CPU)
    zeros = torch.zeros(sequences.response_mask.shape)
    experience = Experience(sequences, zeros, PolicyBatch(zeros, zeros, zeros, sequences.response_mask))
    plain = present_batch(model, experience, Algorithm(), 0.7)
    assert plain.entropy is None
    batch = present_batch(model, experience, Algorithm(entropy_coef=0.1), 0.7)
    torch.testing.assert_close(batch.logprobs, plain.logprobs)
    (gradient,) = torch.autograd.grad(batch.entropy.sum(), model.lm_head.weight)
    assert gradient.any() and not batch.entropy[~sequences.response_mask].any()
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = torch.distributions.Categorical(logits=logits / 0.7).entropy()
        torch.testing.assert_close(batch.entropy[row, : len(response)], expected, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_response_logprobs_equal_those_of_each_row_alone_without_padding():
    model = LlamaForCausalLM(small_config()).eval()
    batch = build_sequences(PROMPTS, RESPONSES, PAD, CPU)
    logprobs = response_logprobs(model, batch, temperature=0.7)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        alone = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(logprobs[row, : len(response)], alone, atol=1e-6, rtol=1e-5)
        assert (logprobs[row, len(response) :] == 0).all()


@torch.no_grad()
def test_the_score_is_read_at_the_last_response_token_where_transformers_reads_it(tmp_path):
    classifier = LlamaForSequenceClassification(small_config()).eval()
    classifier.config.score_mean, classifier.config.score_std = 0.5, 2.0
    classifier.save_pretrained(tmp_path)
    model = load_value_model(str(tmp_path)).eval()
    batch = build_sequences(PROMPTS, RESPONSES, PAD, CPU)
    theirs = [
        classifier(torch.tensor([prompt + response])).logits[0, 0]
        for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
    ]
    torch.testing.assert_close(last_token_scores(model, batch), (torch.stack(theirs) - 0.5) / 2, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_values_are_those_before_each_response_token_and_trimming_changes_none(tmp_path):
    LlamaForSequenceClassification(small_config()).save_pretrained(tmp_path)
    model = load_value_model(str(tmp_path)).eval()
    batch = build_sequences(PROMPTS, RESPONSES, PAD, CPU)
    values = response_values(model, batch)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        alone = build_sequences([prompt], [response], PAD, CPU)
        whole = model(alone)[0]  # one number per token of prompt and response
        torch.testing.assert_close(values[row, : len(response)], whole[len(prompt) - 1 : -1], atol=1e-6, rtol=1e-5)
    rows = torch.tensor([2, 0])
    trimmed = batch.rows(rows)
    assert trimmed.input_ids.shape == (2, 6 + 2) and trimmed.response_mask.shape == (2, 2)
    torch.testing.assert_close(response_values(model, trimmed), values[rows, :2], atol=1e-6, rtol=1e-5)


def test_computing_in_parts_gives_what_one_pass_gives(monkeypatch):
    monkeypatch.setattr("hybrid_engine.rlhf.batches.sequences.ROWS_PER_PASS_ON_CPU", 2)
    model = LlamaForCausalLM(small_config()).eval()
    batch = build_sequences(PROMPTS, RESPONSES, PAD, CPU)
    with torch.no_grad():
        whole, parts = response_logprobs(model, batch), in_parts(response_logprobs, model, batch, RunPasses())
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-5)


def test_padding_is_told_from_lengths_even_where_pad_is_the_end_of_sequence_token():
    prompt_mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    sequences = torch.tensor([[1, 5, 6, 7, 1, 1], [5, 6, 7, 8, 9, 10]])  # 1 is pad and EOS
    batch = attach_responses(prompt_mask, sequences, lengths=torch.tensor([2, 3]))
    assert batch.response_mask.tolist() == [[True, True, False], [True, True, True]]
    assert batch.attention_mask.tolist() == [[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 0, 1, 2, 3, 3], [0, 1, 2, 3, 4, 5]]


def random_rows(seed):
    """Prompts and responses of random lengths, with random gaps, one response in four without any."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    prompts = [[draw(2, 32) for _ in range(draw(1, 7))] for _ in range(5)]
    responses = [[draw(2, 32) for _ in range(draw(1, 9))] for _ in range(5)]
    learned = [[draw(0, 2) == 1 for _ in response[1:]] for response in responses]
    return prompts, responses, [None if draw(0, 4) == 0 else [*mask, True][:: 1 - 2 * draw(0, 2)] for mask in learned]


@pytest.mark.parametrize("seed", range(6))
@torch.no_grad()
def test_gaps_are_read_and_count_for_nothing_however_rows_are_padded_and_split(tmp_path, monkeypatch, seed):
    monkeypatch.setattr("hybrid_engine.rlhf.batches.sequences.ROWS_PER_PASS_ON_CPU", 2)
    config = small_config()
    model = LlamaForCausalLM(config).eval()
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    scorer = load_value_model(str(tmp_path)).eval()
    prompts, responses, learned = random_rows(seed)
    batch = build_sequences(prompts, responses, PAD, CPU, learned)
    logprobs = in_parts(response_logprobs, model, batch, RunPasses())
    values = in_parts(response_values, scorer, batch, RunPasses())
    scores = last_token_scores(scorer, batch)
    width = batch.response_mask.shape[1]
    for row, (prompt, response, mask) in enumerate(zip(prompts, responses, learned, strict=True)):
        mask = mask or [True] * len(response)
        assert batch.response_mask[row].tolist() == mask + [False] * (width - len(mask))
        assert int(batch.attention_mask[row].sum()) == len(prompt) + len(response)
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        alone = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        kept = torch.tensor(mask + [False] * (width - len(mask)))
        expected = torch.zeros(width).masked_scatter(kept, alone[torch.tensor(mask)])
        torch.testing.assert_close(logprobs[row], expected, atol=1e-6, rtol=1e-5)
        assert (values[row] != 0).tolist() == kept.tolist()
        cut = len(mask) - mask[::-1].index(True)  # the score is read where the model last wrote
        (score,) = last_token_scores(scorer, build_sequences([prompt], [response[:cut]], PAD, CPU))
        torch.testing.assert_close(scores[row], score, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("count", [7, 64, 1000])
def test_batches_of_similar_length_hold_each_index_once_and_waste_little(count):
    lengths = torch.randint(1, 60, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = batches_of_similar_length(lengths, 4, torch.Generator().manual_seed(1))
    indices = [index for batch in batches for index in batch]
    assert len(indices) == len(set(indices)) == count // 4 * 4
    padded = sum(4 * max(lengths[index] for index in batch) for batch in batches)
    in_order = sum(4 * max(lengths[start : start + 4]) for start in range(0, count // 4 * 4, 4))
    assert padded < 0.9 * in_order


def test_without_a_pool_batches_hold_what_comes():
    lengths = [1] * 128 + [50] * 128
    batches = batches_of_similar_length(lengths, 32, torch.Generator().manual_seed(1), num_pooled=1)
    assert sorted(index for batch in batches for index in batch) == list(range(256))
    assert all({lengths[index] for index in batch} == {1, 50} for batch in batches)


def _uneven_rows(rank, world_size):
    model = LlamaForCausalLM(small_config()).eval()
    batch = build_sequences(PROMPTS[rank:], RESPONSES[rank:], PAD, CPU)  # three rows, and two
    with torch.no_grad():
        found = in_parts(response_logprobs, model, batch, RunPasses(most_rows=1))
        torch.testing.assert_close(found, response_logprobs(model, batch))
    return len(batch.input_ids)


def test_processes_with_different_numbers_of_rows_make_as_many_passes():
    assert run_distributed(_uneven_rows, 2, seconds=20) == [3, 2]
