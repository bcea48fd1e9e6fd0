"""Importance correction if the sampler's log-probabilities differ from the trainer's: weights for the policy loss.

With w = exp(logprobs_trainer - logprobs_sampler) of a token, both of the same weights at the time of the rollout.
B: sampled responses, T: response tokens. Each function takes `[B, T]` log-probabilities, the mask (bool, True on
response tokens) and the bounds `low` and `high`, and returns weights `[B, T]`, 1 outside the mask and without a
gradient. A weight outside the bounds is moved onto them (truncated) or set to 0 (masked).
"""

from typing import NamedTuple

import torch

from hybrid_engine.rl.advantages import masked_mean


@torch.no_grad()
def truncated(
    logprobs_trainer: torch.Tensor, logprobs_sampler: torch.Tensor, mask: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """Each token's w, within the bounds.

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (TIS, low 0);
    OpenRLHF, `loss.py`, clamps to [0.5, 5].
    """
    return _log_weights(logprobs_trainer, logprobs_sampler, mask).exp().clamp(low, high)


@torch.no_grad()
def masked(
    logprobs_trainer: torch.Tensor, logprobs_sampler: torch.Tensor, mask: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """Each token's w, 0 outside the bounds. Source: Ling team, "Every Step Evolves", arXiv 2510.18855 (IcePop)."""
    return _kept(_log_weights(logprobs_trainer, logprobs_sampler, mask).exp(), low, high)


@torch.no_grad()
def sequence_truncated(
    logprobs_trainer: torch.Tensor, logprobs_sampler: torch.Tensor, mask: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """The product of a sequence's w on all of its tokens, within the bounds. Source: TRL, "sequence_truncate"."""
    weights = sequence_weights(logprobs_trainer, logprobs_sampler, mask)
    return _spread(weights.clamp(low, high), mask)


@torch.no_grad()
def sequence_masked(
    logprobs_trainer: torch.Tensor, logprobs_sampler: torch.Tensor, mask: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """The product of a sequence's w on all of its tokens, 0 outside the bounds. Source: TRL, "sequence_mask"."""
    weights = sequence_weights(logprobs_trainer, logprobs_sampler, mask)
    return _spread(_kept(weights, low, high), mask)


@torch.no_grad()
def geometric_truncated(
    logprobs_trainer: torch.Tensor, logprobs_sampler: torch.Tensor, mask: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """The geometric mean of a sequence's w on all of its tokens, within the bounds. Source: verl, `rollout_corr`."""
    weights = geometric_weights(logprobs_trainer, logprobs_sampler, mask)
    return _spread(weights.clamp(low, high), mask)


@torch.no_grad()
def geometric_masked(
    logprobs_trainer: torch.Tensor, logprobs_sampler: torch.Tensor, mask: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """Each token's w, 0 in sequences whose geometric mean is outside the bounds.

    Source: OpenRLHF, `loss.py`, and NeMo-RL, "seq-mask-tis".
    """
    weights = geometric_weights(logprobs_trainer, logprobs_sampler, mask)
    is_kept = ((weights >= low) & (weights <= high))[:, None] | ~mask
    return torch.where(is_kept, _log_weights(logprobs_trainer, logprobs_sampler, mask).exp(), 0.0)


def sequence_weights(
    logprobs_trainer: torch.Tensor, logprobs_sampler: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """`[B]`: the product of each sequence's w; 1 for a row without a token."""
    return _log_weights(logprobs_trainer, logprobs_sampler, mask).sum(dim=1).exp()


def geometric_weights(
    logprobs_trainer: torch.Tensor, logprobs_sampler: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """`[B]`: the geometric mean of each sequence's w; 1 for a row without a token."""
    log_weights = _log_weights(logprobs_trainer, logprobs_sampler, mask)
    return (log_weights.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).exp()


class Difference(NamedTuple):
    """Distance of two sets of log-probabilities, as means over the response tokens; 0-dimensional each."""

    absolute: torch.Tensor
    """of |log p - log q|, nats a token; 0 when they agree (slime)"""
    multiplicative: torch.Tensor
    """of exp(|log p - log q|); 1 when they agree (NeMo-RL, token_mult_prob_error, alarming above 1.05)"""


@torch.no_grad()
def measure_difference(
    logprobs_trainer: torch.Tensor, logprobs_sampler: torch.Tensor, mask: torch.Tensor
) -> Difference:
    """The difference over this process's tokens; nan without any."""
    distance = _log_weights(logprobs_trainer, logprobs_sampler, mask).abs()
    return Difference(masked_mean(distance, mask), masked_mean(distance.exp(), mask))


def _log_weights(logprobs_trainer: torch.Tensor, logprobs_sampler: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log w of each token, 0 outside the mask."""
    assert logprobs_trainer.shape == logprobs_sampler.shape == mask.shape, f"{logprobs_trainer.shape=} {mask.shape=}"
    return torch.where(mask, logprobs_trainer - logprobs_sampler, 0.0)


def _kept(weights: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


def _spread(weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Weights of sequences `[B]` on their tokens `[B, T]`, 1 elsewhere."""
    return torch.where(mask, weights[:, None], 1.0)
