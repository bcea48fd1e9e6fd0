"""Estimators of KL(policy || reference) from the tokens that the policy sampled.

With x = logprobs - logprobs_ref of a token drawn from the policy (Schulman, "Approximating KL Divergence",
http://joschu.net/blog/kl-approx.html):

    k1 = x                   unbiased, may be negative; the one to subtract from the reward
    k2 = x^2 / 2             biased, its gradient is that of the KL
    k3 = exp(-x) + x - 1     unbiased, never negative

Nothing is clamped. As a loss, k1 is useless: its expected gradient is zero, and the gradient of k3 is that of another
divergence. Two remedies: the value of one estimator with the gradient of k2 (`kl_k1_with_k2_gradient`,
`kl_k3_with_k2_gradient`), or the estimate times the policy's ratio (`importance_weighted`).
"""

import torch


def kl_k1(logprobs: torch.Tensor, logprobs_ref: torch.Tensor) -> torch.Tensor:
    """The k1 estimate of each token, of the shape of both arguments."""
    assert logprobs.shape == logprobs_ref.shape, f"{logprobs.shape=} {logprobs_ref.shape=}"
    return logprobs - logprobs_ref


def kl_k2(logprobs: torch.Tensor, logprobs_ref: torch.Tensor) -> torch.Tensor:
    """The k2 estimate of each token, of the shape of both arguments."""
    return 0.5 * kl_k1(logprobs, logprobs_ref).square()


def kl_k3(logprobs: torch.Tensor, logprobs_ref: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of each token, of the shape of both arguments; infinite where -x exceeds the dtype's log."""
    difference = kl_k1(logprobs, logprobs_ref)
    # expm1 keeps the digits that exp(-x) - 1 loses near x = 0, where training starts.
    return torch.expm1(-difference) + difference


def kl_k1_with_k2_gradient(logprobs: torch.Tensor, logprobs_ref: torch.Tensor) -> torch.Tensor:
    """k1's value and k2's gradient, which is that of the KL. Source: verl, `core_algos.py`, kl_penalty "k1+"."""
    return _straight_through(kl_k1(logprobs, logprobs_ref), kl_k2(logprobs, logprobs_ref))


def kl_k3_with_k2_gradient(logprobs: torch.Tensor, logprobs_ref: torch.Tensor) -> torch.Tensor:
    """k3's value and k2's gradient, which is that of the KL. Source: verl, `core_algos.py`, kl_penalty "k3+"."""
    return _straight_through(kl_k3(logprobs, logprobs_ref), kl_k2(logprobs, logprobs_ref))


def importance_weighted(estimate: torch.Tensor, logprobs: torch.Tensor, logprobs_old: torch.Tensor) -> torch.Tensor:
    """`estimate` * exp(logprobs - logprobs_old), with the gradient of both factors.

    The tokens were drawn from the old policy; so weighted, the expected gradient of k1 and of k3 is that of the KL of
    the policy being trained.

    Args:
        estimate: `[B, T]`, of an estimator above, with its gradient.
        logprobs: `[B, T]`, of the policy being trained.
        logprobs_old: `[B, T]`, of the policy that sampled.

    Source: DeepSeek-AI, "DeepSeek-V3.2", section 3.1 (unbiased KL estimate).
    """
    assert estimate.shape == logprobs.shape == logprobs_old.shape, f"{estimate.shape=} {logprobs.shape=}"
    return estimate * torch.exp(logprobs - logprobs_old)


def _straight_through(value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Returns `value` with the gradient of `gradient`."""
    return value.detach() + (gradient - gradient.detach())


def adaptive_kl_coefficient(coefficient: float, kl: float, target: float, horizon: float, num_samples: int) -> float:
    """The next KL coefficient of the proportional controller that steers the KL to `target`.

        coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)

    Args:
        coefficient: the present one.
        kl: the measured KL per response (summed over its tokens), in nats.
        target: the KL to hold, in nats, above 0.
        horizon: samples over which a persisting full error changes the coefficient by about a fifth.
        num_samples: number of responses that `kl` was measured on.

    Source: Ziegler et al., "Fine-Tuning Language Models from Human Preferences", arXiv 1909.08593, section 2.2.
    """
    assert target > 0 and horizon > 0, f"{target=} {horizon=}"
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * num_samples / horizon)


def token_entropy(logits: torch.Tensor) -> torch.Tensor:
    """The entropy of each distribution in nats, `[...]` from logits `[..., V]` (divided by the temperature before).

    Logits of -inf, such as from filters, count as tokens of probability 0.
    """
    logprobs = logits.log_softmax(dim=-1)
    # Not where() around the product: its backward pass would compute 0 * -inf.
    return -(logprobs.exp() * torch.where(logprobs.isfinite(), logprobs, 0.0)).sum(dim=-1)


def estimated_entropy(logprobs: torch.Tensor) -> torch.Tensor:
    """An estimate of the entropy from log-probabilities of sampled tokens, in their shape; its value is -log pi.

    As with k1, the expected gradient of -log pi is zero; this has -log pi times the gradient of log pi, whose
    expectation is the entropy's gradient while the policy is the one that sampled.
    """
    surrogate = -logprobs.detach() * logprobs
    return -logprobs.detach() + (surrogate - surrogate.detach())
