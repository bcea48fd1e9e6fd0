"""GSPO, CISPO, REINFORCE and whole sequences, gradients of KL, entropy: goldens and finite differences."""

import pytest
import torch

from hybrid_engine.rl.estimates import (
    estimated_entropy,
    importance_weighted,
    kl_k1,
    kl_k1_with_k2_gradient,
    kl_k2,
    kl_k3,
    kl_k3_with_k2_gradient,
    token_entropy,
)
from hybrid_engine.rl.losses import (
    cispo_loss,
    gspo_loss,
    mean_ratio,
    ppo_policy_loss,
    product_ratio,
    reinforce_loss,
    sequence_clip_loss,
)
from tests.support.goldens import assert_golden, load_golden

LOSSES = {
    "clip": lambda new, old, adv, mask: ppo_policy_loss(new, old, adv, 0.2, 0.3, 2.5),
    "gspo": lambda new, old, adv, mask: gspo_loss(new, old, adv, mask, 0.2, 0.3),
    "sequence-clip": lambda new, old, adv, mask: sequence_clip_loss(new, old, adv, mask, 0.2, 0.3),
    "cispo": lambda new, old, adv, mask: cispo_loss(new, old, adv, 0.2, 0.3),
    "reinforce": lambda new, old, adv, mask: reinforce_loss(new, adv),
}


def tokens(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    old, noise, advantages = torch.randn(3, 3, 4, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0]]).bool()
    return old, (old + 0.3 * noise).requires_grad_(), advantages, mask


def test_gspo_is_the_golden():
    golden, rows = load_golden("gspo"), load_golden("ppo")
    mask = torch.ones(2, 3).bool()
    assert_golden(mean_ratio(rows["cur"], rows["old"], mask)[:, 0], golden["seq_ratio"])
    loss = gspo_loss(rows["cur"], rows["old"], rows["adv"], mask, 0.2, 0.2)
    assert_golden(loss.mean(dim=1), golden["loss_row_mean"])


def test_cispo_and_its_gradient_are_the_goldens():
    golden, rows = load_golden("cispo"), load_golden("ppo")
    logprobs = rows["cur"].requires_grad_()
    loss = cispo_loss(logprobs, rows["old"], rows["adv"], golden["eps_low"], golden["eps_high"])
    assert_golden(loss.detach(), golden["loss_tok"])
    loss.sum().backward()
    assert_golden(logprobs.grad, golden["grad_wrt_cur"])


@pytest.mark.parametrize("name", ["clip", "gspo", "sequence-clip", "reinforce"])
def test_gradients_are_those_of_finite_differences(name):
    old, new, advantages, mask = tokens()
    assert torch.autograd.gradcheck(lambda logprobs: LOSSES[name](logprobs, old, advantages, mask)[mask], new)


def test_the_gradient_of_cispo_is_that_of_the_weighted_log_probability():
    old, new, advantages, _ = tokens()
    weight = (new - old).exp().clamp(0.8, 1.3).detach()
    assert torch.autograd.gradcheck(lambda logprobs: -advantages * weight * logprobs, new)
    (found,) = torch.autograd.grad(cispo_loss(new, old, advantages, 0.2, 0.3).sum(), new)
    torch.testing.assert_close(found, -advantages * weight)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(name):
    old, _, advantages, mask = tokens()
    rows = advantages[:, :1].expand_as(advantages)  # one advantage a sequence, where all of them agree
    logprobs = old.clone().requires_grad_()
    loss = torch.where(mask, LOSSES[name](logprobs, old, rows, mask), 0.0).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, torch.where(mask, -rows, 0.0))


@pytest.mark.parametrize("name", LOSSES)
def test_zero_advantages_give_zero_gradients(name):
    old, new, advantages, mask = tokens()
    loss = LOSSES[name](new, old, torch.zeros_like(advantages), mask)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert not gradient.any()


def test_a_sequence_has_one_ratio_of_its_own_tokens():
    old, new, _, mask = tokens()
    logratio = [(new - old)[row][mask[row]] for row in range(3)]
    torch.testing.assert_close(mean_ratio(new, old, mask)[:, 0], torch.stack([part.mean().exp() for part in logratio]))
    torch.testing.assert_close(
        product_ratio(new, old, mask)[:, 0], torch.stack([part.sum().exp() for part in logratio])
    )
    assert mean_ratio(old, old, mask).eq(1).all()
    assert mean_ratio(new, old, torch.zeros_like(mask)).eq(1).all()


def test_the_loss_of_whole_sequences_is_that_of_their_ratio():
    old, new, advantages, mask = tokens()
    rows = advantages[:, :1]
    loss = torch.where(mask, sequence_clip_loss(new, old, rows.expand_as(old), mask, 0.2, 0.3), 0.0).sum(dim=1)
    ratio = product_ratio(new, old, mask)
    expected = -torch.minimum(rows * ratio, rows * ratio.clamp(0.8, 1.3))
    torch.testing.assert_close(loss, expected[:, 0])


@pytest.mark.parametrize(("estimator", "value"), [(kl_k1_with_k2_gradient, kl_k1), (kl_k3_with_k2_gradient, kl_k3)])
def test_a_straight_through_estimate_has_the_gradient_of_k2(estimator, value):
    golden = load_golden("kl")
    logprobs = golden["logprob"].requires_grad_()
    estimate = estimator(logprobs, golden["ref"])
    assert torch.equal(estimate, value(logprobs, golden["ref"]))
    estimate.sum().backward()
    assert_golden(logprobs.grad, golden["grad_k2"])


@pytest.mark.parametrize(("estimator", "is_unbiased"), [(kl_k1, True), (kl_k3, True), (kl_k2, False)])
def test_weighted_by_the_ratio_an_estimate_has_the_gradient_of_the_kl(estimator, is_unbiased):
    generator = torch.Generator().manual_seed(0)
    logits, old, ref = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    logits, old, ref = logits.requires_grad_(), old.log_softmax(0), ref.log_softmax(0)
    logprobs = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True)
    # The expectation over tokens of the old policy, written out.
    weighted = importance_weighted(estimator(logprobs, ref), logprobs, old)
    (found,) = torch.autograd.grad((old.exp() * weighted).sum(), logits, retain_graph=True)
    assert torch.allclose(found, expected) == is_unbiased
    (plain,) = torch.autograd.grad((old.exp() * estimator(logprobs, ref)).sum(), logits)
    assert not torch.allclose(plain, expected)


@pytest.mark.parametrize("estimator", [kl_k1, kl_k2, kl_k3])
def test_the_gradient_of_a_weighted_estimate_is_that_of_finite_differences(estimator):
    old, new, _, _ = tokens()
    ref = old + 0.2
    assert torch.autograd.gradcheck(lambda logprobs: importance_weighted(estimator(logprobs, ref), logprobs, old), new)


def test_entropy_is_that_of_torch_and_its_estimate_has_the_same_gradient_in_the_mean():
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    entropy = token_entropy(logits)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy())
    assert torch.autograd.gradcheck(token_entropy, logits)
    (expected,) = torch.autograd.grad(entropy.sum(), logits, retain_graph=True)
    logprobs = logits.log_softmax(dim=1)
    estimate = (logprobs.exp().detach() * estimated_entropy(logprobs)).sum(dim=1)
    torch.testing.assert_close(estimate, entropy)
    (found,) = torch.autograd.grad(estimate.sum(), logits)
    torch.testing.assert_close(found, expected)


def test_tokens_that_a_filter_took_away_have_no_entropy():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]], requires_grad=True)
    entropy = token_entropy(logits)
    torch.testing.assert_close(entropy, torch.tensor([2.0]).log())
    entropy.sum().backward()
    assert logits.grad.isfinite().all()


def test_tensors_of_different_shapes_are_not_broadcast():
    wide, narrow, mask = torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3).bool()
    for name in LOSSES:
        with pytest.raises(AssertionError, match="shapes"):
            LOSSES[name](wide, wide, narrow, mask)
