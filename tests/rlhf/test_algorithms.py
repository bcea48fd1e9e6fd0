"""Coefficients that follow what was measured, from step to step."""

import pytest

from hybrid_engine.rlhf.algorithms import Coefficients, next_coefficients
from hybrid_engine.rlhf.options.algorithm import Algorithm


def test_the_coefficients_follow_what_was_measured():
    algorithm = Algorithm(entropy_coef=0.01, entropy_target=0.2, entropy_change=0.004, entropy_coef_max=0.015)
    first = Coefficients.first(algorithm)
    assert first == (0.0, 0.01, 0.0)
    # At the target and below it grows and is applied, up to its bound; above it falls, down to 0, and is not applied.
    low = next_coefficients(algorithm, first, {"entropy": 0.2}, 8)
    assert low == pytest.approx((0.0, 0.014, 0.014))
    lower = next_coefficients(algorithm, low, {"entropy": 0.1}, 8)
    assert lower == pytest.approx((0.0, 0.015, 0.015))
    high = next_coefficients(algorithm, lower, {"entropy": 0.3}, 8)
    assert high == pytest.approx((0.0, 0.011, 0.0))
    assert next_coefficients(algorithm, high._replace(entropy=0.001), {"entropy": 0.3}, 8) == (0.0, 0.0, 0.0)
    assert next_coefficients(algorithm, low, {}, 8) == low
    fixed = Coefficients.first(Algorithm(entropy_coef=0.01))
    assert next_coefficients(Algorithm(entropy_coef=0.01), fixed, {"entropy": 0.0}, 8) == fixed == (0.0, 0.01, 0.01)
