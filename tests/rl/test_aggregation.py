"""The aggregations against goldens; splitting, padding and order must not change them."""

import pytest
import torch

from hybrid_engine.rl.aggregation import (
    StepCounts,
    count_step,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_by_length,
    token_mean,
    token_sum_by_length,
)
from hybrid_engine.rl.losses import ppo_policy_loss
from tests.support.goldens import assert_golden, load_golden

pytestmark = pytest.mark.quick

AGGREGATIONS = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "dr_grpo_trl_const_T4": lambda loss, mask, count: seq_mean_token_sum_by_length(loss, mask, count, 4),
    "seq_sum_norm_verl_T4": lambda loss, mask, _: token_sum_by_length(loss, mask, 4),
}


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
