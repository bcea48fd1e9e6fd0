"""Baselines and scales within groups: goldens, a plain definition, and groups that have no statistics."""

import statistics

import pytest
import torch

from hybrid_engine.rl.advantages import moments, returns_to_go, whiten, whitening_deviation_biased
from hybrid_engine.rl.group_advantages import (
    batch_std,
    group_mean,
    group_std,
    has_variance,
    leave_one_out_mean,
    leave_one_out_std,
    normalised_steps,
    scaled_difference,
)
from tests.support.goldens import assert_golden, load_golden

NAN = float("nan")
BASELINES = (group_mean, leave_one_out_mean)


@pytest.mark.parametrize(
    ("name", "eps"),
    [("grpo_verl_slime_eps1e6", 1e-6), ("grpo_trl_torchtune_eps1e4", 1e-4), ("grpo_openrlhf_eps1e9", 1e-9)],
)
def test_the_advantages_of_each_framework_are_the_goldens(name, eps):
    golden = load_golden("group")
    rewards = golden["rewards"]
    assert_golden(scaled_difference(rewards, group_mean(rewards), group_std(rewards, "n-1", eps)), golden[name])


def test_the_other_baselines_and_scales_are_the_goldens():
    golden = load_golden("group")
    rewards, one = golden["rewards"], torch.ones((), dtype=torch.float64)
    others = leave_one_out_mean(rewards)
    assert_golden(scaled_difference(rewards, group_mean(rewards), one), golden["dr_grpo"])
    assert_golden(scaled_difference(rewards, others, one), golden["rloo"])
    assert_golden(scaled_difference(rewards, others, leave_one_out_std(rewards, "n-1", 1e-6)), golden["nemo_loo_std"])
    batch = scaled_difference(rewards, group_mean(rewards), batch_std(rewards, 1e-4))
    assert_golden(batch, golden["scale_rewards_batch_trl"])
    centred = rewards - group_mean(rewards)
    found = moments(centred, torch.ones_like(centred).bool())
    whitened = (centred - found.mean) / whitening_deviation_biased(found)
    assert_golden(whitened, golden["reinforce_baseline_batch_norm_biased"])


def test_returns_to_go_and_their_whitening_are_the_goldens():
    golden, mask = load_golden("reinforce_pp"), load_golden("gae_g1_l95")["mask"]
    returns = returns_to_go(golden["token_rewards"], mask, golden["gamma"])
    assert_golden(returns, golden["returns"])
    assert_golden(whiten(returns, mask), golden["adv_unbiased"])
    found = moments(returns, mask)
    biased = torch.where(mask, (returns - found.mean) / whitening_deviation_biased(found), 0.0)
    assert_golden(biased, golden["adv_biased"])


def test_discounted_returns_step_over_masked_tokens():
    rewards = torch.tensor([[1.0, NAN, 2.0, 4.0]])
    returns = returns_to_go(rewards, torch.tensor([[True, False, True, True]]), 0.5)
    assert returns.tolist() == [[3.0, 0.0, 4.0, 4.0]]


@pytest.mark.parametrize("divisor", ["n", "n-1"])
def test_deviations_are_those_of_the_standard_library(divisor):
    rewards = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = {"n": statistics.pstdev, "n-1": statistics.stdev}[divisor]
    assert group_std(rewards, divisor, 0.0).flatten().tolist() == pytest.approx(
        [plain(row) for row in rewards.tolist()]
    )
    scale = leave_one_out_std(rewards, divisor, 0.0)
    for row in range(3):
        group = rewards[row].tolist()
        expected = [plain(group[:index] + group[index + 1 :]) for index in range(5)]
        assert scale[row].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("baseline", BASELINES)
def test_equal_rewards_give_advantages_of_exactly_zero_whatever_the_rounding(baseline):
    rewards = torch.tensor([[0.1] * 3, [1e8 / 3] * 3, [-0.7] * 3])
    for scale in (group_std(rewards, "n-1", 1e-9), leave_one_out_std(rewards, "n-1", 1e-9)):
        assert torch.equal(scaled_difference(rewards, baseline(rewards), scale), torch.zeros(3, 3))
    assert has_variance(rewards).tolist() == [False] * 3


def test_a_sample_whose_others_agree_is_not_divided():
    rewards = torch.tensor([[1.0, 1.0, 5.0, 1.0]], dtype=torch.float64)
    scale = leave_one_out_std(rewards, "n-1", 1e-6)
    assert scale[0, 2] == 1
    assert scaled_difference(rewards, leave_one_out_mean(rewards), scale)[0, 2] == 4.0


def test_a_sample_that_is_alone_has_no_advantage():
    rewards = torch.tensor([[3.0]])
    assert leave_one_out_mean(rewards).tolist() == [[3.0]]
    alone = torch.tensor([[NAN, 3.0, NAN]])
    for baseline in BASELINES:
        assert not scaled_difference(alone, baseline(alone), leave_one_out_std(alone, "n-1", 1e-6)).any()
    assert group_mean(rewards).tolist() == [[3.0]]
    assert group_std(rewards, "n-1", 1e-6).tolist() == [[1e-6]]
    assert leave_one_out_std(rewards, "n-1", 1e-6).tolist() == [[1.0]]


def test_samples_without_a_reward_count_in_no_statistic():
    dense = torch.tensor([[1.0, 4.0, 2.0]], dtype=torch.float64)
    gapped = torch.tensor([[1.0, NAN, 4.0, 2.0]], dtype=torch.float64)
    for baseline in BASELINES:
        for scale in (
            lambda rewards: group_std(rewards, "n-1", 1e-6),
            lambda rewards: leave_one_out_std(rewards, "n-1", 1e-6),
            lambda rewards: batch_std(rewards, 1e-4),
        ):
            expected = scaled_difference(dense, baseline(dense), scale(dense))[0]
            found = scaled_difference(gapped, baseline(gapped), scale(gapped))[0]
            torch.testing.assert_close(found[[0, 2, 3]], expected)
            assert found[1] == 0
    empty = torch.full((1, 3), NAN)
    assert torch.equal(scaled_difference(empty, group_mean(empty), group_std(empty, "n-1", 1e-6)), torch.zeros(1, 3))
    assert has_variance(torch.tensor([[1.0, NAN, 1.0], [1.0, NAN, 2.0], [NAN, NAN, NAN]])).tolist() == [
        False,
        True,
        False,
    ]


def test_the_order_within_a_group_and_that_of_groups_change_nothing():
    golden = load_golden("group")["rewards"]
    order, rows = torch.tensor([2, 0, 3, 1]), torch.tensor([1, 2, 0])
    for baseline in BASELINES:
        for scale in (group_std, leave_one_out_std):
            expected = scaled_difference(golden, baseline(golden), scale(golden, "n-1", 1e-6))
            moved = golden[rows][:, order]
            found = scaled_difference(moved, baseline(moved), scale(moved, "n-1", 1e-6))
            torch.testing.assert_close(found, expected[rows][:, order], rtol=1e-12, atol=1e-12)


def test_steps_are_normalised_over_the_group_and_summed_from_each_token_on():
    """By hand: the group's steps are 0, 1, 1 and 2, of mean 1 and deviation sqrt(2 / 3) with the divisor n - 1."""
    nan = float("nan")
    steps = torch.tensor([[nan, 0.0, 1.0], [1.0, 2.0, nan]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    normalised = normalised_steps(steps, 2, "n-1", 0.0)
    unit = 1.5**0.5
    torch.testing.assert_close(normalised, torch.tensor([[0.0, -unit, 0.0], [0.0, unit, 0.0]]))
    expected = torch.tensor([[-unit, -unit, 0.0], [unit, unit, 0.0]])
    torch.testing.assert_close(returns_to_go(normalised, mask, 1.0), expected)
    torch.testing.assert_close(normalised_steps(steps, 2, None, 0.0), torch.tensor([[0.0, -1.0, 0.0], [0.0, 1.0, 0.0]]))
