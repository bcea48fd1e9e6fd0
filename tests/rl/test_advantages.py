"""Token rewards, GAE, whitening, baselines and scales against goldens and plain definitions, and what must not change
them.
"""

import math
import statistics
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybrid_engine.rl.advantages import (
    batch_std,
    decoupled_rewards,
    gae,
    group_mean,
    group_mean_scale,
    group_std,
    has_variance,
    leave_one_out_mean,
    leave_one_out_std,
    masked_mean,
    moments,
    normalised_steps,
    returns_to_go,
    scaled_difference,
    teacher_advantages,
    token_rewards,
    whiten,
    whitening_deviation_biased,
)
from hybrid_engine.rl.estimates import kl_k1
from tests.support.distributed import run_distributed
from tests.support.goldens import assert_golden, load_golden

BASELINES = (group_mean, leave_one_out_mean)
pytestmark = pytest.mark.quick
GAE_GROUPS = ["gae_g1_l95", "gae_g99_l95", "gae_g1_l1", "gae_g1_l0"]
NAN = float("nan")


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


def test_over_the_mean_of_the_group_hard_prompts_weigh_more_and_failed_groups_nothing():
    rewards = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, NAN, NAN, 0]], dtype=torch.float64)
    found = scaled_difference(rewards, group_mean(rewards), group_mean_scale(rewards))
    third = 1 / 3
    assert_golden(found, [[3, -1, -1, -1], [third, third, third, -1], [0, 0, 0, 0], [1, 0, 0, -1]])


def test_over_the_mean_the_expected_gradient_is_that_of_a_truncated_logarithm():
    # For answers that are right with the probability p, d log p / dp = sum of (1 - p)^k over all k.
    p, size = 0.3, 4
    found = {"none": 0.0, "group-mean": 0.0}
    for passed in range(size + 1):
        chance = math.comb(size, passed) * p**passed * (1 - p) ** (size - passed)
        rewards = torch.tensor([[1.0] * passed + [0.0] * (size - passed)], dtype=torch.float64)
        scores = torch.where(rewards == 1, 1 / p, -1 / (1 - p))  # d log(probability of the answer) / dp
        for name, baseline in (("none", rewards.new_zeros(())), ("group-mean", group_mean(rewards))):
            advantages = scaled_difference(rewards, baseline, group_mean_scale(rewards))
            found[name] += chance * float((advantages * scores).mean())
    assert found["none"] == pytest.approx(sum((1 - p) ** k for k in range(size)))
    assert found["group-mean"] == pytest.approx(sum((1 - p) ** k for k in range(size - 1)))


def trl_decoupled(rewards, weights, size, eps=1e-4):
    """TRL 1.16, `grpo_trainer.py`, "normalize_then_sum", by the functions of numpy that skip nan; `[N, K]` -> `[N]`."""
    grouped = rewards.reshape(-1, size, rewards.shape[1])
    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of groups that no reward judges
        scaled = (grouped - np.nanmean(grouped, 1, keepdims=True)) / (
            np.nanstd(grouped, 1, ddof=1, keepdims=True) + eps
        )
    total = np.nansum(scaled.reshape(rewards.shape) * weights, axis=1)
    total[np.isnan(rewards).all(1)] = np.nan
    return np.nan_to_num((total - np.nanmean(total)) / (np.nanstd(total, ddof=1) + eps))


def several_rewards() -> torch.Tensor:
    """`[12, 3]`: rewards of scales 1, 100 and 0.01 for groups of four; some do not judge an answer, one none."""
    rewards = torch.randn(12, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rewards = rewards.round(decimals=1) * torch.tensor([1.0, 100.0, 0.01])
    rewards[4:8, 1] = 50.0
    rewards[1, 0] = rewards[2, 2] = NAN
    rewards[9] = NAN
    return rewards


def test_several_rewards_are_normalised_as_by_trl():
    rewards, weights = several_rewards(), torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)

    def normalise(reward):
        return scaled_difference(reward, group_mean(reward), group_std(reward, "n-1", 1e-4))

    found = decoupled_rewards(rewards.view(3, 4, 3), weights, normalise, 1e-4)
    expected = trl_decoupled(rewards.numpy(), weights.numpy(), 4)
    torch.testing.assert_close(found.flatten(), torch.from_numpy(expected), rtol=1e-12, atol=1e-12)
    assert found.flatten()[9] == 0
    # The unit of a reward does not matter, but for eps.
    scaled = decoupled_rewards((rewards * torch.tensor([7.0, 0.1, 300.0])).view(3, 4, 3), weights, normalise, 1e-4)
    torch.testing.assert_close(scaled, found, rtol=0, atol=0.05)


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


def golden_gae(group: str):
    golden = load_golden(group)
    advantages, returns = gae(
        golden["token_rewards_k1"], golden["values"], golden["mask"], golden["gamma"], golden["lam"]
    )
    return golden, advantages, returns


def gae_by_definition(rewards, values, gamma, lam):
    """The sum of discounted deltas of one row without gaps, as the paper writes it."""
    length = len(rewards)
    values = [*values, 0.0]
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(length)]
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(length - t)) for t in range(length)]


@pytest.mark.parametrize("group", GAE_GROUPS)
def test_token_rewards_are_the_goldens(group):
    golden = load_golden(group)
    kl = kl_k1(golden["logprob"], golden["ref"])
    rewards = token_rewards(golden["score"], kl, golden["mask"], golden["kl_coef"])
    assert_golden(rewards, golden["token_rewards_k1"])


def test_the_score_lands_on_the_last_response_token_and_not_on_the_one_after_it():
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]).bool()
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0])
    rewards = token_rewards(scores, torch.zeros(4, 5), mask, kl_coef=0.1)
    expected = torch.zeros(4, 5)
    expected[0, 2], expected[1, 2], expected[2, 4], expected[3, 0] = 1.0, 2.0, 3.0, 4.0
    assert torch.equal(rewards, expected)


def test_a_response_without_tokens_has_no_place_for_its_score():
    with pytest.raises(AssertionError, match="no response token"):
        token_rewards(torch.ones(2), torch.zeros(2, 3), torch.tensor([[1, 0, 0], [0, 0, 0]]).bool(), 0.1)


@pytest.mark.parametrize("group", GAE_GROUPS)
def test_advantages_and_returns_are_the_goldens(group):
    golden, advantages, returns = golden_gae(group)
    assert_golden(advantages, golden["adv"])
    assert_golden(returns, golden["returns"])


def test_gae_is_the_papers_sum_of_discounted_deltas():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    advantages, returns = gae(rewards, values, torch.ones(3, 7).bool(), 0.9, 0.8)
    for row in range(3):
        expected = gae_by_definition(rewards[row].tolist(), values[row].tolist(), 0.9, 0.8)
        assert advantages[row].tolist() == pytest.approx(expected)
    torch.testing.assert_close(returns, advantages + values)


def test_gae_carries_value_and_advantage_over_masked_gaps():
    golden = load_golden("gae_interior_gap")
    arguments = golden["mask"], golden["gamma"], golden["lam"]
    advantages, returns = gae(golden["token_rewards"], golden["values"], *arguments)
    assert_golden(advantages, golden["adv_carry_forward_verl_nemo"])
    assert not torch.allclose(advantages, golden["adv_zeroed_values_openrlhf_trl_dschat"], atol=1e-3)
    assert returns[0, 2] == 0


def test_a_row_with_a_gap_has_the_advantages_of_the_row_without_it():
    rewards, values = torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    present = torch.tensor([[1, 0, 1, 1, 0, 0, 1, 0]]).bool()
    spread = [torch.full((1, 8), NAN, dtype=torch.float64).masked_scatter(present, part) for part in (rewards, values)]
    dense, _ = gae(rewards, values, torch.ones(1, 4).bool(), 0.9, 0.8)
    gapped, returns = gae(*spread, present, 0.9, 0.8)
    assert torch.equal(gapped[present], dense[0])
    assert torch.equal(gapped[~present], torch.zeros(4, dtype=torch.float64))
    assert returns.isfinite().all()


def test_what_lies_under_the_padding_and_the_order_of_rows_change_nothing():
    golden = load_golden("gae_g99_l95")
    mask, order = golden["mask"], torch.tensor([1, 0])
    inputs = [golden["logprob"] - golden["ref"], golden["values"]]
    poisoned = [part.masked_fill(~mask, NAN) for part in inputs]

    def run(kl, values, mask, scores):
        rewards = token_rewards(scores, kl, mask, 0.1)
        advantages, returns = gae(rewards, values, mask, 0.99, 0.95)
        return torch.stack([rewards, advantages, returns, whiten(advantages, mask), whiten(rewards, mask, False)])

    expected = run(*inputs, mask, golden["score"])
    assert torch.equal(run(*poisoned, mask, golden["score"]), expected)
    swapped = run(*(part[order] for part in inputs), mask[order], golden["score"][order])
    torch.testing.assert_close(swapped[:, order], expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("group", GAE_GROUPS)
def test_whitened_advantages_are_the_goldens_with_unbiased_variance(group):
    golden, advantages, _ = golden_gae(group)
    whitened = whiten(advantages, golden["mask"])
    assert_golden(whitened, golden["adv_whiten_unbiased_eps"])
    assert masked_mean(whitened, golden["mask"]).abs() < 1e-12


def test_whitening_without_mean_shift_adds_the_mean_back():
    golden, advantages, _ = golden_gae("gae_g1_l95")
    whitened = whiten(advantages, golden["mask"], shift_mean=False)
    assert_golden(whitened, golden["adv_whiten_torchtune_mean_added_back"])
    assert masked_mean(whitened, golden["mask"]).item() == pytest.approx(advantages[golden["mask"]].mean().item())


def test_whitening_a_single_token_or_none_leaves_nothing():
    for first in (True, False):
        assert not whiten(torch.ones(1, 2), torch.tensor([[first, False]])).any()


def test_the_masked_mean_reads_only_the_mask():
    values = torch.tensor([[1.0, NAN, 3.0], [8.0, NAN, NAN]])
    assert masked_mean(values, torch.tensor([[1, 0, 1], [1, 0, 0]]).bool()) == 4.0
    assert masked_mean(values, torch.zeros(2, 3).bool()).isnan()


def whiten_a_share(rank: int, world_size: int) -> list[torch.Tensor]:
    """Whitens rows dealt out unevenly: rank 0 has the first row, rank 1 the rest; and once with rank 1 empty."""
    values, mask = whitening_rows()
    rows = slice(0, 1) if rank == 0 else slice(1, None)
    mine = mask.clone()
    if rank == 1:
        mine[:] = False
    return [
        whiten(values[rows], mask[rows], group=dist.group.WORLD),
        whiten(values[rows], mask[rows], shift_mean=False, group=dist.group.WORLD),
        whiten(values, mine, group=dist.group.WORLD),
        whiten(values[rows], mask[rows]),
    ]


def whitening_rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(4, 6, generator=generator) + 3, torch.rand(4, 6, generator=generator) > 0.4


def test_whitening_over_a_group_does_not_depend_on_how_rows_are_spread():
    values, mask = whitening_rows()
    first, second = run_distributed(whiten_a_share, 2)
    for index, shift_mean in enumerate((True, False)):
        together = torch.cat([first[index], second[index]])
        torch.testing.assert_close(together, whiten(values, mask, shift_mean), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(first[2], whiten(values, mask), rtol=1e-6, atol=1e-6)
    assert torch.equal(second[2], torch.zeros(4, 6))
    # Without a group each process whitens its own rows, which is another result.
    assert not torch.allclose(torch.cat([first[3], second[3]]), whiten(values, mask), atol=1e-2)


def test_a_teachers_advantages_are_minus_the_reverse_kl_of_each_token():
    old = torch.tensor([[-1.2, -0.7, -2.0], [-0.4, -1.1, 9.0]])
    teacher = torch.tensor([[-0.9, -1.5, -1.0], [-0.4, -3.0, NAN]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    found = teacher_advantages(old, teacher, mask, 0.5)
    torch.testing.assert_close(found, torch.tensor([[0.15, -0.4, 0.5], [0.0, -0.95, 0.0]]))
    bounded = teacher_advantages(old, teacher, mask, 0.5, 0.9)
    torch.testing.assert_close(bounded, torch.tensor([[0.15, -0.4, 0.45], [0.0, -0.45, 0.0]]))
