"""Weights for the policy loss: importance correction for the sampler's difference, and the tokens that count.

With w = exp(logprobs_trainer - logprobs_sampler) of a token, both of the same weights at the time of the rollout.
B: sampled responses, T: response tokens. Each function takes `[B, T]` log-probabilities, the mask (bool, True on
response tokens) and the bounds `low` and `high`, and returns weights `[B, T]`, 1 outside the mask and without a
gradient. A weight outside the bounds is moved onto them (truncated) or set to 0 (masked).

The tokens that count are chosen once for a rollout, from the log-probabilities of the policy that sampled and over all
processes, so that neither micro-batches nor processes change the choice. Answers to one prompt begin with equal
distributions, so values that only rounding tells apart are common: they are chosen together.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybrid_engine.rl.advantages import gather_values, masked_mean, moments

ROUNDING = 1e-5
"""Nats by which equal log-probabilities and entropies may differ, computed in fp32 among other rows."""
HASHED_DIGITS = 1e-4
"""Nats to which log-probabilities are rounded before they are hashed."""


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


@torch.no_grad()
def within_policy(
    logprobs: torch.Tensor,
    logprobs_sampler: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    threshold: float,
) -> torch.Tensor:
    """`[B, T]` bool: False where A < 0 and the sequence has become unlikely, mean_t log(mu / pi) > threshold.

    A sequence that the policy being trained, pi, would no longer draw as the sampler, mu, did teaches little by being
    pushed down further.

    Source: DeepSeek-AI, "DeepSeek-V3.2", arXiv 2512.02556, section 3.1 (off-policy sequence masking); TRL,
    `grpo_trainer.py`, get_off_policy_mask.
    """
    log_weights = _log_weights(logprobs, logprobs_sampler, mask)
    distance = -log_weights.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return (advantages >= 0) | (distance <= threshold)


@torch.no_grad()
def of_high_entropy(
    entropy: torch.Tensor, mask: torch.Tensor, share: float, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """`[B, T]` bool: True on the tokens whose entropy is at least the quantile 1 - share of all tokens.

    Args:
        entropy: `[B, T]`, in nats, of the distributions that the tokens were drawn from.
        mask: `[B, T]` bool.
        share: of the tokens, from 0, which leaves the highest, to 1.
        group: collective over these processes; None for this process's tokens alone.

    Source: Wang et al., "Beyond the 80/20 Rule", arXiv 2506.01939, section 5 (share 0.2); the quantile is interpolated
    as in TRL, `grpo_trainer.py`, get_high_entropy_mask.
    """
    values = gather_values(entropy[mask].double(), group).sort().values
    if not len(values):
        return torch.zeros_like(mask)
    place = (1 - share) * (len(values) - 1)
    below, above = values[math.floor(place)], values[math.ceil(place)]
    return mask & (entropy.double() >= torch.lerp(below, above, place - math.floor(place)) - ROUNDING)


@torch.no_grad()
def covariances(
    logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """`[B, T]` float64: each token's term of the covariance of log-probability and advantage, over all tokens.

        (log pi - mean log pi) * (A - mean A)

    A policy gradient lowers the entropy by it. Collective over `group` unless that is None.

    Source: Cui et al., "The Entropy Mechanism of Reinforcement Learning", arXiv 2505.22617, section 4.2.
    """
    mean_logprob, mean_advantage = moments(logprobs, mask, group).mean, moments(advantages, mask, group).mean
    return torch.where(mask, (logprobs.double() - mean_logprob) * (advantages.double() - mean_advantage), 0.0)


@torch.no_grad()
def most_covariant(
    covariance: torch.Tensor, mask: torch.Tensor, share: float, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """`[B, T]` bool: True on this share of all tokens, at least one, whose covariances are the largest (KL-Cov).

    Tokens that are equal to the last of them count too. Collective over `group` unless that is None. Source: as
    `covariances`; verl, `core_algos.py`, "kl_cov" (share 2e-4).
    """
    return _first_of(-covariance, mask, _share_of(mask, share, group), group, ROUNDING)


@torch.no_grad()
def drawn_covariant(
    covariance: torch.Tensor,
    logprobs: torch.Tensor,
    mask: torch.Tensor,
    share: float,
    low: float,
    high: float,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """`[B, T]` bool: True on this share of all tokens, drawn from those with low < covariance < high (Clip-Cov).

    A share of the tokens is at least one, and all where fewer are within the bounds. The draw hashes the
    log-probabilities: it is the same however the tokens are split. Collective over `group` unless that is None.
    Source: as `covariances`; verl, `core_algos.py`, "clip_cov" (share 2e-4, bounds 1 and 5).
    """
    within = mask & (covariance > low) & (covariance < high)
    return _first_of(_hashed(logprobs / HASHED_DIGITS), within, _share_of(mask, share, group), group, 0)


def _share_of(mask: torch.Tensor, share: float, group: dist.ProcessGroup | None) -> int:
    return max(1, int(share * int(moments(mask.double(), mask, group).count)))


def _first_of(
    keys: torch.Tensor, mask: torch.Tensor, number: int, group: dist.ProcessGroup | None, rounding: float
) -> torch.Tensor:
    """Bool: True where the mask is and the key is one of the `number` smallest of all processes, up to rounding."""
    smallest = gather_values(keys[mask], group).sort().values[:number]
    return mask & (keys <= smallest[-1] + rounding) if len(smallest) else torch.zeros_like(mask)


def _hashed(values: torch.Tensor) -> torch.Tensor:
    """int64 of the shape of `values`: mixed bits of each, rounded to an integer (the finalizer of MurmurHash3)."""
    bits = values.nan_to_num().round().long() & 0xFFFFFFFF
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


def _log_weights(logprobs_trainer: torch.Tensor, logprobs_sampler: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log w of each token, 0 outside the mask."""
    assert logprobs_trainer.shape == logprobs_sampler.shape == mask.shape, f"{logprobs_trainer.shape=} {mask.shape=}"
    return torch.where(mask, logprobs_trainer - logprobs_sampler, 0.0)


def _kept(weights: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


def _spread(weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Weights of sequences `[B]` on their tokens `[B, T]`, 1 elsewhere."""
    return torch.where(mask, weights[:, None], 1.0)
