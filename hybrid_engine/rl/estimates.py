"""Estimates from samples: KL(policy || reference), pass@k, and the confidence interval of a mean over prompts.

With x = logprobs - logprobs_ref of a token drawn from the policy (Schulman, "Approximating KL Divergence",
http://joschu.net/blog/kl-approx.html):

    k1 = x                   unbiased, may be negative; the one to subtract from the reward
    k2 = x^2 / 2             biased, its gradient is that of the KL
    k3 = exp(-x) + x - 1     unbiased, never negative

Nothing is clamped. As a loss, k1 is useless: its expected gradient is zero, and the gradient of k3 is that of another
divergence. Two remedies: the value of one estimator with the gradient of k2 (`kl_k1_with_k2_gradient`,
`kl_k3_with_k2_gradient`), or the estimate times the policy's ratio (`importance_weighted`).

For intervals the unit is the prompt: answers to one prompt resemble each other, so its mean, or its pass@k, is one
observation, and the prompts are the random sample. This is the clustered standard error of Miller, "Adding Error Bars
to Evals", arXiv 2411.00640, for clusters of one size. All intervals are of 95%. B: prompts, G: answers to each.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

NORMAL_QUANTILE = statistics.NormalDist().inv_cdf(0.975)
FEW_STUDENT_QUANTILES = {1: 12.7062, 2: 4.3027}
"""Quantiles by degrees of freedom, for those where the expansion is not accurate."""


class Interval(NamedTuple):
    """A mean and the ends of its 95% confidence interval."""

    mean: float
    low: float
    high: float


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The unbiased estimate of the probability that one of k answers passes: 1 - C(n - c, k) / C(n, k).

    Chen et al., arXiv 2107.03374, equation 1. `num_samples` is n, of which `num_passed`, c, passed.

    Raises:
        ValueError: k is not from 1 to n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"{k=} must be from 1 to the number of samples, {num_samples}; draw more, or lower it")
    assert 0 <= num_passed <= num_samples, f"{num_passed=} {num_samples=}"
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of `values`, `[B]`, one per prompt, and Student's interval; a single value is its own interval."""
    mean, error = statistics.fmean(values), standard_error(values)
    margin = student_quantile(len(values) - 1) * error if len(values) > 1 else 0.0
    return Interval(mean, mean - margin, mean + margin)


def rate_interval(rates: Sequence[float], num_draws: int) -> Interval:
    """The mean of `rates`, `[B]`, the pass@k of each prompt, and Wilson's interval for the effective number of draws.

    Student's interval would leave [0, 1], and have no width where all prompts passed. Wilson's takes p (1 - p) / s^2
    independent draws, s being the standard error by prompt: the modified Wilson interval of Dean and Pagano, Journal
    of Survey Statistics and Methodology 3 (2015). At most all `num_draws` of each prompt count, G / k; where all
    prompts passed or none did, one of each.
    """
    mean, error = min(max(statistics.fmean(rates), 0.0), 1.0), standard_error(rates)
    if mean in (0.0, 1.0):
        size = float(len(rates))
    else:
        most = float(len(rates) * num_draws)
        size = min(mean * (1.0 - mean) / error**2, most) if error else most
    z2 = NORMAL_QUANTILE**2
    centre = (mean + z2 / (2.0 * size)) / (1.0 + z2 / size)
    margin = NORMAL_QUANTILE * math.sqrt(mean * (1.0 - mean) / size + z2 / (4.0 * size**2)) / (1.0 + z2 / size)
    return Interval(mean, min(max(centre - margin, 0.0), mean), max(min(centre + margin, 1.0), mean))


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of `values`: their deviation (divisor B - 1) over the root of B; 0 for one."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def student_quantile(degrees: int) -> float:
    """The 97.5% quantile of Student's t, to 2e-3 of it: Abramowitz and Stegun, 26.7.5."""
    if degrees in FEW_STUDENT_QUANTILES:
        return FEW_STUDENT_QUANTILES[degrees]
    z, v = NORMAL_QUANTILE, float(degrees)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / v**power for power, term in enumerate(terms, start=1))


def kl_k1(logprobs: torch.Tensor, logprobs_ref: torch.Tensor) -> torch.Tensor:
    """The k1 estimate of each token, of the shape of both arguments."""
    assert logprobs.shape == logprobs_ref.shape, f"{logprobs.shape=} {logprobs_ref.shape=}"
    return logprobs - logprobs_ref


def kl_k2(logprobs: torch.Tensor, logprobs_ref: torch.Tensor) -> torch.Tensor:
    """The k2 estimate of each token, of the shape of both arguments."""
    return 0.5 * kl_k1(logprobs, logprobs_ref).square()


def kl_k3(logprobs: torch.Tensor, logprobs_ref: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of each token, of the shape of both arguments; infinite where -x exceeds the dtype's log."""
    difference = kl_k1(logprobs, logprobs_ref)
    # expm1 keeps the digits that exp(-x) - 1 loses near x = 0, where training starts.
    return torch.expm1(-difference) + difference


def kl_k1_with_k2_gradient(logprobs: torch.Tensor, logprobs_ref: torch.Tensor) -> torch.Tensor:
    """k1's value and k2's gradient, which is that of the KL. Source: verl, `core_algos.py`, kl_penalty "k1+"."""
    return _straight_through(kl_k1(logprobs, logprobs_ref), kl_k2(logprobs, logprobs_ref))


def kl_k3_with_k2_gradient(logprobs: torch.Tensor, logprobs_ref: torch.Tensor) -> torch.Tensor:
    """k3's value and k2's gradient, which is that of the KL. Source: verl, `core_algos.py`, kl_penalty "k3+"."""
    return _straight_through(kl_k3(logprobs, logprobs_ref), kl_k2(logprobs, logprobs_ref))


def importance_weighted(estimate: torch.Tensor, logprobs: torch.Tensor, logprobs_old: torch.Tensor) -> torch.Tensor:
    """`estimate` * exp(logprobs - logprobs_old), with the gradient of both factors.

    The tokens were drawn from the old policy; so weighted, the expected gradient of k1 and of k3 is that of the KL of
    the policy being trained.

    Args:
        estimate: `[B, T]`, of an estimator above, with its gradient.
        logprobs: `[B, T]`, of the policy being trained.
        logprobs_old: `[B, T]`, of the policy that sampled.

    Source: DeepSeek-AI, "DeepSeek-V3.2", section 3.1 (unbiased KL estimate).
    """
    assert estimate.shape == logprobs.shape == logprobs_old.shape, f"{estimate.shape=} {logprobs.shape=}"
    return estimate * torch.exp(logprobs - logprobs_old)


def _straight_through(value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Returns `value` with the gradient of `gradient`."""
    return value.detach() + (gradient - gradient.detach())


def adaptive_kl_coefficient(coefficient: float, kl: float, target: float, horizon: float, num_samples: int) -> float:
    """The next KL coefficient of the proportional controller that steers the KL to `target`.

        coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)

    Args:
        coefficient: the present one.
        kl: the measured KL per response (summed over its tokens), in nats.
        target: the KL to hold, in nats, above 0.
        horizon: samples over which a persisting full error changes the coefficient by about a fifth.
        num_samples: number of responses that `kl` was measured on.

    Source: Ziegler et al., "Fine-Tuning Language Models from Human Preferences", arXiv 1909.08593, section 2.2.
    """
    assert target > 0 and horizon > 0, f"{target=} {horizon=}"
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * num_samples / horizon)


def adaptive_entropy_coefficient(
    coefficient: float, entropy: float, target: float, change: float, largest: float
) -> float:
    """The next coefficient of the controller that keeps the entropy from falling below `target`.

        coefficient + change where entropy <= target, else coefficient - change, within 0 and `largest`

    Its bonus is applied only while the entropy is at or below the target.

    Args:
        coefficient: the present one.
        entropy: the measured mean over tokens, in nats.
        target: the entropy to hold, in nats.
        change: of the coefficient in a step.
        largest: coefficient.

    Source: He et al., "Skywork Open Reasoner 1", arXiv 2505.22312 (target 0.2, change 0.005).
    """
    return min(max(coefficient + (change if entropy <= target else -change), 0.0), largest)


def token_entropy(logits: torch.Tensor) -> torch.Tensor:
    """The entropy of each distribution in nats, `[...]` from logits `[..., V]` (divided by the temperature before).

    Logits of -inf, such as from filters, count as tokens of probability 0.
    """
    logprobs = logits.log_softmax(dim=-1)
    # Not where() around the product: its backward pass would compute 0 * -inf.
    return -(logprobs.exp() * torch.where(logprobs.isfinite(), logprobs, 0.0)).sum(dim=-1)


def estimated_entropy(logprobs: torch.Tensor) -> torch.Tensor:
    """An estimate of the entropy from log-probabilities of sampled tokens, in their shape; its value is -log pi.

    As with k1, the expected gradient of -log pi is zero; this has -log pi times the gradient of log pi, whose
    expectation is the entropy's gradient while the policy is the one that sampled.
    """
    surrogate = -logprobs.detach() * logprobs
    return -logprobs.detach() + (surrogate - surrogate.detach())
