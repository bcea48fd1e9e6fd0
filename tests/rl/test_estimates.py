"""KL estimates against goldens, pass@k by counting all choices, and intervals by formulas, by a bootstrap and by how
often they are right.
"""

import math
import random
import statistics
from itertools import combinations

import pytest
import torch

from hybrid_engine.rl.estimates import (
    adaptive_kl_coefficient,
    kl_k1,
    kl_k2,
    kl_k3,
    mean_interval,
    pass_at_k,
    rate_interval,
    student_quantile,
)
from tests.support.goldens import assert_golden, load_golden

pytestmark = pytest.mark.quick
ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


@pytest.mark.parametrize(("num_samples", "num_passed"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (6, 6)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_with_one_that_passes(num_samples, num_passed):
    answers = [True] * num_passed + [False] * (num_samples - num_passed)
    for k in range(1, num_samples + 1):
        choices = list(combinations(answers, k))
        assert pass_at_k(num_samples, num_passed, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-15)


def test_pass_at_k_is_exact_where_floats_would_overflow():
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01, abs=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_a_k_that_the_samples_do_not_reach_is_refused(k):
    with pytest.raises(ValueError, match=f"k={k} must be from 1 to the number of samples, 4"):
        pass_at_k(4, 2, k)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (6, 2.4469), (10, 2.2281), (30, 2.0423), (200, 1.9719)],
)
def test_students_quantile_is_that_of_the_tables(degrees, quantile):
    assert student_quantile(degrees) == pytest.approx(quantile, rel=2e-3)


def test_the_interval_of_a_mean_is_students_by_hand():
    interval = mean_interval([1.0, 2.0, 3.0, 6.0])
    error = math.sqrt(14 / 3) / 2  # the squares of -2, -1, 0 and 3 over B - 1, over B
    assert interval.mean == 3.0
    assert interval.high - 3.0 == pytest.approx(3.1824 * error, rel=2e-3) == 3.0 - interval.low
    assert mean_interval([2.5]) == (2.5, 2.5, 2.5)


def test_the_interval_of_a_mean_is_that_of_a_bootstrap_over_prompts():
    generator = random.Random(0)
    values = [generator.expovariate(1.0) for _ in range(60)]
    means = [statistics.fmean(generator.choices(values, k=60)) for _ in range(4000)]
    cuts = statistics.quantiles(means, n=40)
    interval = mean_interval(values)
    assert interval.high - interval.low == pytest.approx(cuts[-1] - cuts[0], rel=0.08)


def test_the_interval_of_a_rate_is_wilsons_where_each_prompt_has_one_answer():
    rates = [1.0] * 30 + [0.0] * 70
    interval = rate_interval(rates, 1)
    z, n = 1.959964, 99.0  # p (1 - p) over the variance with divisor B - 1, over B
    centre, margin = (0.3 + z * z / (2 * n)) / (1 + z * z / n), math.sqrt(0.21 / n + z * z / (4 * n * n))
    assert interval == pytest.approx(
        (0.3, centre - z * margin / (1 + z * z / n), centre + z * margin / (1 + z * z / n))
    )


@pytest.mark.parametrize(("rate", "low", "high"), [(0.0, 0.0, 0.1611), (1.0, 0.8389, 1.0)])
def test_the_interval_of_a_rate_has_a_width_where_all_prompts_agree(rate, low, high):
    assert rate_interval([rate] * 20, 8) == pytest.approx((rate, low, high), abs=1e-4)


def test_answers_that_agree_within_each_prompt_count_as_one_and_alike_prompts_as_all_their_answers():
    one_each = rate_interval([1.0, 0.0] * 20, 8)
    alike = rate_interval([0.5] * 40, 8)
    ratio = (one_each.high - one_each.low) / (alike.high - alike.low)
    assert ratio == pytest.approx(math.sqrt(8), rel=0.06)


@pytest.mark.parametrize(("num_prompts", "num_samples", "alpha", "beta"), [(20, 4, 1.0, 1.0), (50, 8, 20.0, 1.0)])
def test_intervals_hold_the_truth_in_95_of_100_cases(num_prompts, num_samples, alpha, beta):
    """Of the rate where prompts are of different difficulty; 1000 cases have a deviation of 0.7 of 100."""
    generator, hits = random.Random(0), 0
    for _ in range(1000):
        chances = [generator.betavariate(alpha, beta) for _ in range(num_prompts)]
        rates = [sum(generator.random() < p for _ in range(num_samples)) / num_samples for p in chances]
        interval = rate_interval(rates, num_samples)
        hits += interval.low <= alpha / (alpha + beta) <= interval.high
    assert 0.93 < hits / 1000 < 0.975


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimates_and_their_gradients_are_the_goldens_unclamped(name):
    golden = load_golden("kl")
    logprobs = golden["logprob"].requires_grad_()
    estimate = ESTIMATORS[name](logprobs, golden["ref"])
    assert_golden(estimate, golden[name])
    estimate.sum().backward()
    assert_golden(logprobs.grad, golden[f"grad_{name}"])


def test_k1_and_k3_average_to_the_kl_and_k3_is_never_negative():
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    ref = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    kl = torch.nn.functional.kl_div(ref, policy, reduction="sum", log_target=True)
    for estimator in (kl_k1, kl_k3):
        torch.testing.assert_close((policy.exp() * estimator(policy, ref)).sum(), kl)
    assert (kl_k1(policy, ref) < 0).any()
    assert (kl_k3(policy, ref) >= 0).all()


def test_k3_keeps_its_digits_where_policy_and_reference_almost_agree():
    logprobs = torch.tensor([-1.0])
    ref = logprobs + 1e-3
    exact = kl_k3(logprobs.double(), ref.double())
    torch.testing.assert_close(kl_k3(logprobs, ref).double(), exact, rtol=1e-3, atol=0)


def test_equal_policies_have_no_kl():
    logprobs = torch.randn(3, 5)
    for estimator in ESTIMATORS.values():
        assert torch.equal(estimator(logprobs, logprobs), torch.zeros(3, 5))


def test_the_adaptive_coefficient_moves_by_at_most_a_fifth_of_samples_over_horizon():
    golden = load_golden("adaptive_kl")
    target, horizon = golden["target"], golden["horizon"]
    coefficient = adaptive_kl_coefficient(golden["init"], golden["current"], target, horizon, golden["n_steps"])
    assert coefficient == pytest.approx(golden["value"], abs=1e-12)
    assert adaptive_kl_coefficient(0.2, 6.0, 6.0, 10_000, 256) == 0.2
    assert adaptive_kl_coefficient(0.2, 6.6, 6.0, 10_000, 1000) == pytest.approx(0.2 * 1.01)
    assert adaptive_kl_coefficient(0.2, 0.0, 6.0, 10_000, 1000) == pytest.approx(0.2 * 0.98)


def test_tensors_of_different_shapes_are_not_broadcast():
    with pytest.raises(AssertionError, match="shape"):
        kl_k1(torch.zeros(2, 3), torch.zeros(3))
