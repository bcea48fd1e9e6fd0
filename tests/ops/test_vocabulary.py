"""Searches by blocks find what going element by element finds; filters keep what transformers keeps."""

import pytest
import torch
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

from hybrid_engine.ops.sample import filter_logits, first_above, first_largest

pytestmark = pytest.mark.quick

SIZES = (1, 63, 128, 129, 1000, 4096)


@pytest.mark.parametrize("size", SIZES)
def test_the_first_of_the_largest_is_found(size):
    torch.manual_seed(size)
    values = torch.randn(20, size)
    ties = torch.randint(0, 3, (20, size)).float()
    last = torch.full((20, size), float("-inf"))
    last[:, -1] = -1e30
    for rows in (values, ties, last, values.t().contiguous().t()):
        assert first_largest(rows).tolist() == rows.argmax(-1).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_the_first_above_a_share_is_that_of_the_running_sum(size):
    """Weights are whole numbers, whose sums are exact in any order; every share is taken, also those on a boundary."""
    torch.manual_seed(size)
    weights = torch.randint(0, 4, (200, size)).float()
    weights[:, torch.randint(size, ())] += 1  # no row without any
    totals = weights.cumsum(-1)
    wanted = torch.randint(0, 2**30, (200, 1)) % totals[:, -1:].long()
    share = wanted.float() / totals[:, -1:]
    exact = wanted.float() == share * totals[:, -1:]  # where the share can be written in fp32
    expected = (totals > wanted).int().argmax(-1, keepdim=True)
    assert exact.float().mean() > 0.5
    assert first_above(weights, share)[exact].tolist() == expected[exact].tolist()
    assert first_above(weights.t().contiguous().t(), share)[exact].tolist() == expected[exact].tolist()


@pytest.mark.parametrize("size", SIZES)
def test_what_has_no_weight_is_never_found(size):
    """Of shares that end anywhere, also at 1; weights are many magnitudes apart, so that sums round."""
    torch.manual_seed(size)
    weights = (torch.randn(300, size) * 20).softmax(-1) * (torch.rand(300, size) < 0.2)
    weights[:, torch.randint(size, ())] = 1e-20
    shares = torch.cat([torch.rand(250, 1), torch.ones(30, 1), torch.zeros(20, 1)])
    assert (weights.gather(1, first_above(weights, shares)) > 0).all()


def test_a_row_that_is_not_a_number_stays_inside():
    weights = torch.full((2, 300), float("nan"))
    assert (first_above(weights, torch.tensor([[0.0], [1.0]])) < 300).all() and (first_largest(weights) < 300).all()


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0, 60.0], ids=["flat", "mild", "peaked", "one token"])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_keeps_what_transformers_keeps_however_flat(spread, top_p):
    torch.manual_seed(3)
    logits = torch.randn(16, 3001) * spread
    assert torch.equal(filter_logits(logits, 0, top_p, 0.0), TopPLogitsWarper(top_p)(None, logits))


@pytest.mark.parametrize("top_k", [1, 50, 3000])
def test_filters_together_keep_what_transformers_keeps(top_k):
    torch.manual_seed(4)
    logits = torch.randn(16, 3001) * 3
    expected = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(top_k)(None, logits))
    assert torch.equal(filter_logits(logits, top_k, 0.9, 0.0), expected)


def test_tokens_of_equal_logit_stay_or_go_together():
    """The two zeros are equal too, and a token that is banned stays so."""
    logits = torch.tensor([[0.0, -0.0, -1.0, 0.0, -3.0, float("-inf")]])
    for options in ({"top_k": 1, "top_p": 1.0}, {"top_k": 0, "top_p": 0.2}, {"top_k": 2, "top_p": 0.5}):
        kept = filter_logits(logits, **options, min_p=0.0).isfinite()
        assert kept.tolist() == [[True, True, False, True, False, False]], options
    assert filter_logits(logits, 5, 1.0, 1.0).isfinite().tolist() == [[True, True, False, True, False, False]]
