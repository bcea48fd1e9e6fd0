"""The PPO losses and the means of a step, against goldens; a loss does not depend on how a step's rows are split."""

import pytest
import torch

from hybrid_engine.rl.losses import (
    StepCounts,
    clipped_value_loss,
    count_step,
    explained_variance,
    policy_metrics,
    ppo_policy_loss,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_by_length,
    token_mean,
    token_sum_by_length,
)
from tests.support.distributed import run_distributed
from tests.support.goldens import assert_golden, load_golden

AGGREGATIONS = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "dr_grpo_trl_const_T4": lambda loss, mask, count: seq_mean_token_sum_by_length(loss, mask, count, 4),
    "seq_sum_norm_verl_T4": lambda loss, mask, _: token_sum_by_length(loss, mask, 4),
}
pytestmark = pytest.mark.quick
NAN = float("nan")


def denominator(name: str, mask: torch.Tensor) -> int:
    """What the whole step counts: tokens for `token_mean`, rows that have a token for the others."""
    return int(mask.sum() if name == "token_mean" else mask.any(dim=1).sum())


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_each_aggregation_is_its_golden(name):
    golden = load_golden("agg")
    loss, mask = golden["loss"], golden["mask"]
    assert_golden(AGGREGATIONS[name](loss, mask, denominator(name, mask)), golden[name])


@pytest.mark.parametrize("name", AGGREGATIONS)
@pytest.mark.parametrize("splits", [(2, 1), (1, 2), (1, 1, 1)])
def test_the_shares_of_the_micro_batches_sum_to_the_step_however_it_is_split(name, splits):
    golden = load_golden("agg")
    total = denominator(name, golden["mask"])
    parts = zip(golden["loss"].split(splits), golden["mask"].split(splits), strict=True)
    assert_golden(sum(AGGREGATIONS[name](loss, mask, total) for loss, mask in parts), golden[name])


def test_the_token_mean_is_global_and_not_the_mean_of_micro_batch_means():
    golden = load_golden("agg")
    parts = zip(golden["loss"].split((2, 1)), golden["mask"].split((2, 1)), strict=True)
    shares = [token_mean(loss, mask, int(golden["mask"].sum())) for loss, mask in parts]
    assert sum(shares).item() == pytest.approx(3.6667, abs=1e-4)
    assert golden["naive_mean_of_microbatch_means_mb_2_1"] == 5.0


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_padding_and_row_order_change_nothing(name):
    golden = load_golden("agg")
    loss, mask = golden["loss"], golden["mask"]
    nan = float("nan")
    padded_loss = torch.nn.functional.pad(loss.masked_fill(~mask, nan), (2, 3, 0, 1), value=nan)
    padded_mask = torch.nn.functional.pad(mask, (2, 3, 0, 1))
    order = torch.tensor([3, 1, 0, 2])
    total = denominator(name, padded_mask)
    assert_golden(AGGREGATIONS[name](padded_loss[order], padded_mask[order], total), golden[name])


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_the_gradient_of_a_policy_does_not_depend_on_the_micro_batches_or_on_padding(name):
    generator = torch.Generator().manual_seed(3)
    weights, old, advantages = torch.randn(3, 6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) > 0.3
    total = denominator(name, mask)

    def gradient(splits: list[int], padding: int) -> torch.Tensor:
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        parts = [torch.nn.functional.pad(part, (0, padding)) for part in (weights, old, advantages, mask)]
        for logits, logprobs_old, advantage, present in zip(*(part.split(splits) for part in parts), strict=True):
            loss = ppo_policy_loss(logits * scale, logprobs_old, advantage)
            AGGREGATIONS[name](loss, present, total).backward()
        return scale.grad

    whole = gradient([6], 0)
    assert whole != 0
    for splits, padding in [([2, 4], 0), ([1] * 6, 0), ([6], 7), ([3, 3], 2)]:
        torch.testing.assert_close(gradient(splits, padding), whole)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_the_gradient_of_each_aggregation_is_that_of_finite_differences(name):
    golden = load_golden("agg")
    mask, loss = golden["mask"], golden["loss"].requires_grad_()
    assert torch.autograd.gradcheck(lambda values: AGGREGATIONS[name](values, mask, denominator(name, mask)), loss)


def test_a_mask_of_numbers_or_of_another_shape_is_refused():
    with pytest.raises(AssertionError, match="dtype"):
        token_mean(torch.zeros(2, 3), torch.ones(2, 3), 6)
    with pytest.raises(AssertionError, match="shape"):
        token_mean(torch.zeros(2, 3), torch.ones(3, dtype=torch.bool), 6)


def test_a_step_counts_its_tokens_and_the_rows_that_have_one():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1]]).bool()
    assert count_step(mask, 7) == StepCounts(num_tokens=4, num_sequences=2, max_length=7)
    assert count_step(torch.zeros(2, 3).bool(), 7) == StepCounts(1, 1, 7)


def test_the_clipped_loss_of_each_token_is_the_golden():
    golden = load_golden("ppo")
    loss = ppo_policy_loss(golden["cur"], golden["old"], golden["adv"])
    assert_golden(loss, golden["loss_tok"])
    assert loss[0].mean().item() == pytest.approx(-0.6333, abs=1e-4)


def test_the_upper_clip_can_be_higher_than_the_lower():
    golden = load_golden("ppo")
    loss = ppo_policy_loss(golden["cur"], golden["old"], golden["adv"], 0.2, 0.28)
    assert_golden(loss, golden["loss_clip_higher_028"])


def test_dual_clip_bounds_the_loss_of_bad_tokens_and_leaves_good_ones_alone():
    golden = load_golden("ppo")
    loss = ppo_policy_loss(golden["cur"], golden["old"], golden["adv"], dual_clip=3.0)
    assert_golden(loss, golden["loss_dual_clip_c3"])
    slime = load_golden("dual_clip_slime")
    old = torch.zeros_like(slime["ratio"])
    assert_golden(ppo_policy_loss(slime["ratio"].log(), old, slime["adv"], dual_clip=slime["c"]), slime["loss"])


def test_on_policy_the_ratio_is_one_and_the_gradient_is_that_of_reinforce():
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(3, 4, generator=generator).requires_grad_()
    advantages = torch.randn(3, 4, generator=generator)
    loss = ppo_policy_loss(logprobs, logprobs.detach(), advantages)
    assert torch.equal(loss, -advantages)
    loss.sum().backward()
    assert torch.equal(logprobs.grad, -advantages)
    metrics = policy_metrics(logprobs, logprobs, advantages, torch.ones(3, 4).bool())
    assert {name: value.item() for name, value in metrics.items()} == {"clip_fraction": 0, "approx_kl": 0, "ratio": 1}


def test_zero_advantage_gives_zero_loss_and_zero_gradient():
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(3, 4, generator=generator).requires_grad_()
    loss = ppo_policy_loss(logprobs, torch.randn(3, 4, generator=generator), torch.zeros(3, 4), dual_clip=3.0)
    loss.sum().backward()
    assert not loss.any() and not logprobs.grad.any()


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [(1.5, 1.0, 0.0), (0.5, -1.0, 0.0), (0.5, 1.0, -0.5), (1.5, -1.0, 1.5), (10.0, -1.0, 0.0)],
)
def test_the_gradient_vanishes_only_where_the_clip_stops_a_move_that_pays(ratio, advantage, gradient):
    logprobs = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    old = torch.zeros(1, dtype=torch.float64)
    ppo_policy_loss(logprobs, old, torch.full_like(old, advantage), dual_clip=3.0).backward()
    assert logprobs.grad.item() == pytest.approx(gradient)


def test_policy_metrics_are_the_goldens():
    golden = load_golden("ppo")
    mask = torch.ones(2, 3).bool()
    metrics = policy_metrics(golden["cur"], golden["old"], golden["adv"], mask)
    assert_golden(metrics["clip_fraction"], golden["clipfrac"])
    assert_golden(metrics["approx_kl"], golden["approx_kl_k3"])
    assert_golden(metrics["ratio"], golden["ratio"].mean())


def test_policy_metrics_read_only_the_mask():
    golden = load_golden("ppo")
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]]).bool()
    inputs = [golden[name].masked_fill(~mask, NAN) for name in ("cur", "old", "adv")]
    metrics = policy_metrics(*inputs, mask)
    chosen = [golden[name][mask][None] for name in ("cur", "old", "adv")]
    expected = policy_metrics(*chosen, torch.ones(1, 4).bool())
    for name, value in metrics.items():
        torch.testing.assert_close(value, expected[name])


def test_the_value_loss_has_the_factor_one_half():
    golden = load_golden("value")
    loss = clipped_value_loss(golden["v"], golden["old"], golden["ret"], golden["clip"])
    assert_golden(loss, golden["loss_tok"] / 2)
    assert_golden(loss.mean(), golden["half_mean"])


def test_an_unclipped_value_has_the_gradient_of_half_the_squared_error():
    values = torch.tensor([0.45, -0.3], dtype=torch.float64, requires_grad=True)
    old, returns = torch.tensor([[0.4, -0.25], [1.0, -1.0]], dtype=torch.float64)
    clipped_value_loss(values, old, returns, clip=0.2).sum().backward()
    torch.testing.assert_close(values.grad, values.detach() - returns)


def test_explained_variance_is_the_golden_and_one_for_perfect_values():
    golden = load_golden("value")
    mask = torch.ones(3).bool()
    assert_golden(explained_variance(golden["v"], golden["ret"], mask), golden["explained_variance_biased"])
    assert explained_variance(golden["ret"], golden["ret"], mask) == 1
    constant = torch.full_like(golden["ret"], 0.7)
    assert explained_variance(constant, golden["ret"], mask).item() == pytest.approx(0)


def test_explained_variance_reads_only_the_mask():
    golden = load_golden("value")
    padded = [torch.cat([golden[name], torch.tensor([NAN])]) for name in ("v", "ret")]
    mask = torch.tensor([1, 1, 1, 0]).bool()
    assert_golden(explained_variance(*padded, mask), golden["explained_variance_biased"])


def explain_a_share(rank, world_size):
    """Of the processes' returns, which lie around means of their own."""
    part = slice(rank, None, world_size)
    values, returns, mask = explained_data()
    return explained_variance(values[part], returns[part], mask[part], torch.distributed.group.WORLD)


def explained_data():
    chance = torch.Generator().manual_seed(5)
    returns = torch.randn(6, 7, generator=chance) + torch.arange(6)[:, None] % 2 * 4
    return returns + torch.randn(6, 7, generator=chance), returns, torch.rand(6, 7, generator=chance) < 0.8


def test_explained_variance_is_that_of_the_tokens_of_all_processes():
    found, whole = run_distributed(explain_a_share, 2), explained_variance(*explained_data())
    torch.testing.assert_close(torch.stack(found), whole.expand(2))


def test_tensors_of_different_shapes_are_not_broadcast():
    wide, narrow = torch.zeros(2, 3), torch.zeros(2, 1)
    with pytest.raises(AssertionError, match="shapes"):
        ppo_policy_loss(wide, wide, narrow)
    with pytest.raises(AssertionError, match="shapes"):
        clipped_value_loss(wide, wide, narrow, 0.2)
