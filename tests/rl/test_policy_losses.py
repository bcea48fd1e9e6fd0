"""GSPO, CISPO, REINFORCE, SAPO, GMPO, DPPO and VESPO, gradients of KL, entropy: goldens and finite differences."""

import pytest
import torch
from trl import GRPOTrainer

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
    VespoShape,
    cispo_loss,
    clip_cov_loss,
    dppo_kl_loss,
    dppo_kl_masked,
    dppo_tv_loss,
    gmpo_loss,
    gspo_loss,
    kl_cov_loss,
    mean_ratio,
    ppo_policy_loss,
    product_ratio,
    reinforce_loss,
    sapo_loss,
    sequence_clip_loss,
    vespo_loss,
)
from tests.support.goldens import assert_golden, load_golden

LOSSES = {
    "clip": lambda new, old, adv, mask: ppo_policy_loss(new, old, adv, 0.2, 0.3, 2.5),
    "gspo": lambda new, old, adv, mask: gspo_loss(new, old, adv, mask, 0.2, 0.3),
    "sequence-clip": lambda new, old, adv, mask: sequence_clip_loss(new, old, adv, mask, 0.2, 0.3),
    "cispo": lambda new, old, adv, mask: cispo_loss(new, old, adv, 0.2, 0.3),
    "reinforce": lambda new, old, adv, mask: reinforce_loss(new, adv),
    "sapo": lambda new, old, adv, mask: sapo_loss(new, old, adv, 1.0, 1.05),
    "gmpo": lambda new, old, adv, mask: gmpo_loss(new, old, adv, mask, 0.4, 0.3),
    "dppo": lambda new, old, adv, mask: dppo_tv_loss(new, old, adv, 0.15, 0.15, 20.0),
    "dppo-kl": lambda new, old, adv, mask: dppo_kl_loss(new, old, adv, 0.05, 0.05, 20.0),
    "vespo": lambda new, old, adv, mask: vespo_loss(new, old, adv, mask, VESPO),
}
VESPO = VespoShape(2.0, 3.0, 3.0, 2.0)


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


def rows(*numbers: list[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_sapo_is_the_gate_of_the_paper():
    # 4 / tau / (1 + exp(-tau (ratio - 1))): 2 for ratio 1, and by hand for the ratios 1.5, 0.25 and 4.
    new, advantages = rows([1.0, 1.5, 0.25, 4.0]).log().requires_grad_(), rows([1.0, 2.0, -1.0, -3.0])
    loss = sapo_loss(new, torch.zeros_like(new), advantages, 1.0, 1.05)
    assert_golden(loss.detach(), [[-2.0, -4.979674649615, 1.191259884963, 10.958956820566]])
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    # A * ratio * 4 sigmoid (1 - sigmoid)
    assert_golden(gradient, [[-1.0, -2.820044546419, 0.214920852605, 1.891333682703]])


def test_gmpo_clips_each_logarithm_on_the_side_of_its_advantage():
    log_ratio = rows([0.7, -0.7, 0.1, 0.0], [0.7, -0.7, 0.1, 9.0])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    advantages = rows([2.0] * 4, [-2.0] * 4)
    loss = gmpo_loss(log_ratio, torch.zeros_like(log_ratio), advantages, mask, 0.4, 0.3)
    # exp((0.3 - 0.7 + 0.1 + 0) / 4) and exp((0.7 - 0.4 + 0.1) / 3)
    assert_golden(loss[:, 0], [-1.855486972657, 2.285261623591])
    assert torch.equal(loss, loss[:, :1].expand_as(loss))


DPPO_CASES = [
    # mu, pi, advantage, out of the region of the total variation 0.15, out of that of the KL 0.05
    (0.5, 0.7, 1.0, True, True),
    (0.5, 0.7, -1.0, False, False),
    (0.5, 0.3, -1.0, True, True),
    (0.5, 0.3, 1.0, False, False),
    (0.5, 0.64, 1.0, False, False),
    (0.01, 0.10, 1.0, False, True),
    (0.001, 0.03, 1.0, False, False),
    (0.999, 0.9, -1.0, False, True),
]


@pytest.mark.parametrize(("before", "now", "advantage", "left_tv", "left_kl"), DPPO_CASES)
def test_dppo_leaves_out_tokens_that_left_their_region_with_their_advantage(before, now, advantage, left_tv, left_kl):
    sampled, new = rows([before]).log(), rows([now]).log().requires_grad_()
    for loss, bound, is_left in ((dppo_tv_loss, 0.15, left_tv), (dppo_kl_loss, 0.05, left_kl)):
        value = loss(new, sampled, rows([advantage]), bound, bound, 20.0)
        expected = 0.0 if is_left else -advantage * min(now / before, 20.0)
        torch.testing.assert_close(value.detach(), expected * new.detach())
        (gradient,) = torch.autograd.grad(value.sum(), new)
        torch.testing.assert_close(gradient, rows([expected]))


def test_the_divergence_of_dppo_is_that_of_two_bernoulli_distributions():
    kl = torch.distributions.kl_divergence
    bernoulli = torch.distributions.Bernoulli
    before, now = torch.rand(2, 1, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = kl(bernoulli(before), bernoulli(now)) > 0.05
    found = dppo_kl_masked(now.log(), before.log(), now - before, 0.05, 0.05)
    assert torch.equal(found, expected)
    assert 0 < expected.sum() < 200


def test_the_losses_of_covariant_tokens_are_those_of_the_paper():
    new, advantages = rows([1.5, 0.9, 1.1, 2.0]).log().requires_grad_(), rows([1.0, 2.0, -1.0, -3.0])
    chosen, old = torch.tensor([[False, True, True, False]]), torch.zeros_like(new)
    clipped = clip_cov_loss(new, old, advantages, chosen, 0.2, 0.2)
    assert_golden(clipped.detach(), [[-1.2, 0.0, 0.0, 6.0]])
    assert_golden(torch.autograd.grad(clipped.sum(), new)[0], [[0.0, 0.0, 0.0, 6.0]])
    # 0.5 * |log 0.9| and 0.5 * |log 1.1| are added; the gradients are -A * ratio and -+ 0.5.
    penalised = kl_cov_loss(new, old, advantages, chosen, 0.5)
    assert_golden(penalised.detach(), [[-1.5, -1.747319742171, 1.147655089902, 6.0]])
    assert_golden(torch.autograd.grad(penalised.sum(), new)[0], [[-1.5, -2.3, 1.6, 6.0]])


def test_a_token_of_probability_one_has_a_finite_divergence():
    certain, other = rows([0.0, 0.0, -2.0]), rows([0.0, -1.0, 0.0])
    found = dppo_kl_masked(other, certain, rows([1.0, -1.0, 1.0]), 0.05, 0.05)
    assert found.tolist() == [[False, True, True]]


def test_the_weights_of_vespo_are_those_of_trl():
    old, new, advantages, mask = tokens()
    one_each = advantages[:, :1].expand_as(advantages)
    loss = vespo_loss(new, old, one_each, mask, VESPO)
    weights = GRPOTrainer.get_gamma_weights(advantages[:, :1], (new - old).detach(), mask.double(), None, *VESPO)
    torch.testing.assert_close(loss, -weights * one_each * new)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    torch.testing.assert_close(gradient, -weights * one_each)


def test_vespo_forgets_a_sequence_that_is_far_away_on_either_side():
    far, mask = rows([40.0, 30.0], [-40.0, -30.0]), torch.ones(2, 2).bool()
    for advantage in (1.0, -1.0):
        loss = vespo_loss(far, torch.zeros_like(far), torch.full_like(far, advantage), mask, VESPO)
        assert loss.abs().max() < 1e-50


@pytest.mark.parametrize("name", ["clip", "gspo", "sequence-clip", "reinforce", "sapo", "gmpo"])
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
