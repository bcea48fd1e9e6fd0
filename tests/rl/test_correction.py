"""Importance correction, the measured difference and punished lengths, against goldens and plain definitions."""

import pytest
import torch
from trl import GRPOTrainer

from hybrid_engine.rl.advantages import overlong_penalty, without_cut_off
from hybrid_engine.rl.correction import (
    covariances,
    drawn_covariant,
    geometric_weights,
    masked,
    measure_difference,
    most_covariant,
    of_high_entropy,
    sequence_weights,
    truncated,
    within_policy,
)
from hybrid_engine.rlhf.algorithms import CORRECTIONS, correction_weights
from hybrid_engine.rlhf.options.algorithm import Algorithm
from tests.support.goldens import assert_golden, load_golden

NAN = float("nan")
WIDTHS = torch.tensor([[40], [7], [0], [25]])
TOKENS = torch.arange(40)[None] < WIDTHS
"""`[4, 40]` bool: the tokens of four responses, one of them empty."""


def log_probabilities():
    golden = load_golden("is")
    mask = torch.ones_like(golden["w"]).bool()
    return golden, (golden["train_old"], golden["sampler"], mask)


def test_weights_of_tokens_are_the_goldens():
    golden, pair = log_probabilities()
    assert_golden(truncated(*pair, 0.0, float("inf")), golden["w"])
    assert_golden(truncated(*pair, 0.0, 2.0), golden["tis_c2"])
    assert_golden(truncated(*pair, 0.5, 5.0), golden["tis_openrlhf_05_5"])
    assert_golden(masked(*pair, 0.5, 5.0), golden["icepop_05_5"])


def test_weights_of_sequences_and_the_differences_are_the_goldens():
    golden, pair = log_probabilities()
    assert_golden(sequence_weights(*pair)[0], golden["seq_prod"])
    assert_golden(geometric_weights(*pair)[0], golden["seq_geo"])
    difference = measure_difference(*pair)
    assert_golden(difference.absolute, golden["abs_diff_slime"])
    assert_golden(difference.multiplicative, golden["mult_prob_error_nemo"])


@pytest.mark.parametrize(
    ("name", "low", "high", "expected"),
    [
        ("sequence-truncated", 0.8, 2.0, 0.8),
        ("sequence-truncated", 0.5, 2.0, "seq_prod"),
        ("sequence-masked", 0.5, 2.0, "seq_prod"),
        ("sequence-masked", 0.7, 2.0, 0.0),
        ("geometric-truncated", 0.95, 2.0, 0.95),
        ("geometric-truncated", 0.5, 2.0, "seq_geo"),
        ("geometric-masked", 0.95, 2.0, 0.0),
        ("geometric-masked", 0.5, 2.0, "w"),
    ],
)
def test_a_sequence_is_weighed_as_a_whole(name, low, high, expected):
    golden, pair = log_probabilities()
    expected = torch.as_tensor(golden[expected] if isinstance(expected, str) else expected, dtype=torch.float64)
    assert_golden(CORRECTIONS[name](*pair, low, high), expected.expand(1, 4))


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_padding_is_never_read_and_gets_the_weight_one(name):
    _, (trainer, sampler, mask) = log_probabilities()
    expected = CORRECTIONS[name](trainer, sampler, mask, 0.5, 2.0)
    padded = [torch.nn.functional.pad(part, (1, 2), value=NAN) for part in (trainer, sampler)]
    wide = torch.nn.functional.pad(mask, (1, 2))
    weights = CORRECTIONS[name](*padded, wide, 0.5, 2.0)
    assert_golden(weights[:, 1:5], expected)
    assert weights[~wide].eq(1).all()
    assert CORRECTIONS[name](*padded, torch.zeros_like(wide), 0.5, 2.0).eq(1).all()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_where_sampler_and_trainer_agree_every_weight_is_one(name):
    _, (trainer, _, mask) = log_probabilities()
    assert CORRECTIONS[name](trainer, trainer, mask, 0.5, 2.0).eq(1).all()
    difference = measure_difference(trainer, trainer, mask)
    assert (difference.absolute, difference.multiplicative) == (0, 1)


def test_nothing_is_corrected_up_to_the_measured_difference_that_is_allowed():
    _, pair = log_probabilities()
    algorithm = Algorithm(correction="masked", correction_low=0.5, correction_high=5.0, correction_threshold=0.01)
    assert correction_weights(algorithm, 0.01, *pair) is None
    assert correction_weights(Algorithm(), 1.0, *pair) is None
    assert_golden(correction_weights(algorithm, 0.011, *pair), masked(*pair, 0.5, 5.0))


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_the_mask_of_off_policy_sequences_is_trls():
    sampler, moved = random_tokens(2, 4, 40)
    new = sampler + 0.3 * moved - torch.tensor([[0.2], [-0.2], [0.0], [0.0]])
    threshold = 0.05
    for sign in (1.0, -1.0):
        advantages = torch.full_like(new, sign)
        kept = within_policy(new, sampler, advantages, TOKENS, threshold)
        theirs = GRPOTrainer.get_off_policy_mask(advantages[:, :1], new, sampler, TOKENS.double(), threshold)
        assert torch.equal(kept, theirs.bool().expand_as(kept))
        assert kept.all() == (sign > 0)
        assert torch.equal(within_policy(sampler, sampler, advantages, TOKENS, threshold), torch.ones_like(TOKENS))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.37, 1.0])
def test_the_tokens_of_high_entropy_are_those_from_the_quantile_of_torch_on(share):
    entropy = random_tokens(4, 40).exp()
    chosen = of_high_entropy(entropy.masked_fill(~TOKENS, NAN), TOKENS, share)
    assert torch.equal(chosen, TOKENS & (entropy >= torch.quantile(entropy[TOKENS], 1 - share)))
    assert chosen.sum() == {0.0: 1, 0.2: 15, 0.37: 27, 1.0: 72}[share]
    assert not of_high_entropy(entropy, torch.zeros_like(TOKENS), share).any()


def test_covariances_are_the_terms_of_the_covariance():
    logprobs, advantages = random_tokens(2, 4, 40)
    terms = covariances(logprobs.masked_fill(~TOKENS, NAN), advantages.masked_fill(~TOKENS, NAN), TOKENS)
    pair = torch.stack([logprobs[TOKENS], advantages[TOKENS]])
    torch.testing.assert_close(terms[TOKENS].mean(), torch.cov(pair, correction=0)[0, 1])
    torch.testing.assert_close(terms[TOKENS], (pair[0] - pair[0].mean()) * (pair[1] - pair[1].mean()))
    assert not terms[~TOKENS].any()


def test_the_most_covariant_tokens_are_those_of_the_largest_terms():
    terms = random_tokens(4, 40).where(TOKENS, 100.0)
    for share, number in ((1e-4, 1), (0.1, 7), (1.0, 72)):
        chosen = most_covariant(terms, TOKENS, share)
        assert chosen.sum() == number and not (chosen & ~TOKENS).any()
        assert set(terms[chosen].tolist()) == set(terms[TOKENS].topk(number).values.tolist())
    assert not most_covariant(terms, torch.zeros_like(TOKENS), 0.1).any()


def test_covariant_tokens_are_drawn_evenly_from_those_within_the_bounds():
    terms, logprobs = random_tokens(2, 50, 200)
    mask = torch.ones_like(terms).bool()
    within = (terms > 0.5) & (terms < 2.0)
    chosen = drawn_covariant(terms, logprobs, mask, 0.1, 0.5, 2.0)
    assert chosen.sum() == 1000 and not (chosen & ~within).any()
    # About 1000 of 2860: their log-probabilities are distributed as those of all.
    assert abs(logprobs[chosen].mean() - logprobs[within].mean()) < 0.1
    assert abs(logprobs[chosen].std() - logprobs[within].std()) < 0.1
    assert torch.equal(drawn_covariant(terms, logprobs, mask, 1.0, 0.5, 2.0), within)
    assert not drawn_covariant(terms, logprobs, mask, 1.0, 7.0, 8.0).any()


def test_the_punishment_of_length_is_the_golden():
    golden = load_golden("dapo_overlong")
    lengths = golden["lengths"]
    penalty = overlong_penalty(lengths, golden["max_len"], golden["buffer"], golden["factor"])
    assert_golden(penalty, golden["penalty"])
    assert_golden(overlong_penalty(lengths.long(), 20, 4, 0.5).double(), golden["penalty"] / 2)
    assert overlong_penalty(torch.tensor([25]), 20, 4) == -1


def test_responses_that_were_cut_off_leave_the_mask():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]]).bool()
    assert without_cut_off(mask, torch.tensor([False, True, False])).sum(dim=1).tolist() == [2, 0, 1]
