"""The KL estimators against goldens, their gradients and the KL that they estimate."""

import pytest
import torch

from hybrid_engine.rl.kl import adaptive_kl_coefficient, kl_k1, kl_k2, kl_k3
from tests.support.goldens import assert_golden, load_golden

pytestmark = pytest.mark.quick

ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimates_and_their_gradients_are_the_goldens_unclamped(name):
    golden = load_golden("kl")
    logprobs = golden["logprob"].requires_grad_()
    estimate = ESTIMATORS[name](logprobs, golden["ref"])
    assert_golden(estimate, golden[name])
    estimate.sum().backward()
    assert_golden(logprobs.grad, golden[f"grad_{name}"])


def test_k1_and_k3_average_to_the_kl_and_k3_is_never_negative():
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    ref = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    kl = torch.nn.functional.kl_div(ref, policy, reduction="sum", log_target=True)
    for estimator in (kl_k1, kl_k3):
        torch.testing.assert_close((policy.exp() * estimator(policy, ref)).sum(), kl)
    assert (kl_k1(policy, ref) < 0).any()
    assert (kl_k3(policy, ref) >= 0).all()


def test_k3_keeps_its_digits_where_policy_and_reference_almost_agree():
    logprobs = torch.tensor([-1.0])
    ref = logprobs + 1e-3
    exact = kl_k3(logprobs.double(), ref.double())
    torch.testing.assert_close(kl_k3(logprobs, ref).double(), exact, rtol=1e-3, atol=0)


def test_equal_policies_have_no_kl():
    logprobs = torch.randn(3, 5)
    for estimator in ESTIMATORS.values():
        assert torch.equal(estimator(logprobs, logprobs), torch.zeros(3, 5))


def test_the_adaptive_coefficient_moves_by_at_most_a_fifth_of_samples_over_horizon():
    golden = load_golden("adaptive_kl")
    target, horizon = golden["target"], golden["horizon"]
    coefficient = adaptive_kl_coefficient(golden["init"], golden["current"], target, horizon, golden["n_steps"])
    assert coefficient == pytest.approx(golden["value"], abs=1e-12)
    assert adaptive_kl_coefficient(0.2, 6.0, 6.0, 10_000, 256) == 0.2
    assert adaptive_kl_coefficient(0.2, 6.6, 6.0, 10_000, 1000) == pytest.approx(0.2 * 1.01)
    assert adaptive_kl_coefficient(0.2, 0.0, 6.0, 10_000, 1000) == pytest.approx(0.2 * 0.98)


def test_tensors_of_different_shapes_are_not_broadcast():
    with pytest.raises(AssertionError, match="shape"):
        kl_k1(torch.zeros(2, 3), torch.zeros(3))
