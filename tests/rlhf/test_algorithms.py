"""What choices do over several steps: coefficients that follow measurements, and rewards that compete."""

import pytest
import torch

from hybrid_engine.rl.losses import count_step
from hybrid_engine.rlhf.algorithms import (
    Coefficients,
    PolicyBatch,
    compute_advantages,
    next_coefficients,
    policy_objective,
)
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


def learn_two_bits(aggregation: str, steps: int = 60) -> tuple[float, float]:
    """Probabilities of the two right bits after training a policy over four answers of one token, two bits each.

    The first bit is worth 1, the second 100; a noise of 50 on the second reward never goes away.
    """
    generator, size = torch.Generator().manual_seed(0), 8
    algorithm = Algorithm(reward_aggregation=aggregation, policy_loss="reinforce")
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=0.5)
    mask = torch.ones(16 * size, 1).bool()
    for _ in range(steps):
        answers = torch.multinomial(logits.detach().softmax(dim=0), len(mask), replacement=True, generator=generator)
        noise = torch.randn(len(mask), generator=generator, dtype=torch.float64)
        rewards = torch.stack([(answers // 2).double(), 100 * (answers % 2) + 50 * noise], dim=1)
        scores = rewards if algorithm.is_decoupled else rewards.sum(dim=1)
        zeros = torch.zeros_like(mask, dtype=torch.float64)
        advantages = compute_advantages(algorithm, scores, size, zeros, None, mask, 0.0)
        logprobs = logits.log_softmax(dim=0)[answers][:, None]
        batch = PolicyBatch(logprobs, logprobs.detach(), advantages, mask)
        optimizer.zero_grad()
        policy_objective(algorithm, batch, count_step(mask, 1), Coefficients.first(algorithm)).backward()
        optimizer.step()
    chances = logits.detach().softmax(dim=0)
    return float(chances[2] + chances[3]), float(chances[1] + chances[3])


def test_of_rewards_of_scales_1_and_100_a_sum_learns_the_second_and_decoupled_ones_both():
    of_sum, decoupled = learn_two_bits("sum-then-normalize"), learn_two_bits("normalize-then-sum")
    assert of_sum[1] > 0.9 and of_sum[0] < 0.7
    assert min(decoupled) > 0.9
