"""The policy's entropy per token: from the logits, or estimated from the sampled tokens alone."""

import torch


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
