"""Estimates from samples: pass@k, and the confidence interval of a mean over prompts.

The unit is the prompt: answers to one prompt resemble each other, so its mean, or its pass@k, is one observation, and
the prompts are the random sample. This is the clustered standard error of Miller, "Adding Error Bars to Evals", arXiv
2411.00640, for clusters of one size. All intervals are of 95%.

B: prompts, G: answers to each.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

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
