"""How a policy's update goes: what is logged beside its loss, as means over the tokens of a micro-batch."""

from collections.abc import Callable

import torch

from hybrid_engine.rl.advantages import masked_mean
from hybrid_engine.rl.entropy import estimated_entropy
from hybrid_engine.rl.kl import kl_k3
from hybrid_engine.rl.losses import is_clipped, policy_metrics
from hybrid_engine.rl.policy_losses import mean_ratio, product_ratio
from hybrid_engine.rlhf.algorithms.choices import Algorithm
from hybrid_engine.rlhf.algorithms.objective import PolicyBatch, without_padding


def _clip(algorithm: Algorithm, batch: PolicyBatch) -> torch.Tensor:
    ratio = torch.exp(batch.logprobs - batch.logprobs_old)
    return is_clipped(ratio, batch.advantages, algorithm.clip_low, algorithm.clip_high)


def _gspo(algorithm: Algorithm, batch: PolicyBatch) -> torch.Tensor:
    ratio = mean_ratio(batch.logprobs, batch.logprobs_old, batch.mask)
    return is_clipped(ratio, batch.advantages, algorithm.clip_low, algorithm.clip_high)


def _sequence_clip(algorithm: Algorithm, batch: PolicyBatch) -> torch.Tensor:
    ratio = product_ratio(batch.logprobs, batch.logprobs_old, batch.mask)
    return is_clipped(ratio, batch.advantages, algorithm.clip_low, algorithm.clip_high)


def _cispo(algorithm: Algorithm, batch: PolicyBatch) -> torch.Tensor:
    ratio = torch.exp(batch.logprobs - batch.logprobs_old)
    return ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) != ratio


def _nowhere(algorithm: Algorithm, batch: PolicyBatch) -> torch.Tensor:
    return torch.zeros_like(batch.mask)


CLIPPED: dict[str, Callable[[Algorithm, PolicyBatch], torch.Tensor]] = {
    "clip": _clip,
    "gspo": _gspo,
    "cispo": _cispo,
    "reinforce": _nowhere,
    "sequence-clip": _sequence_clip,
}
"""`[N, T]` bool: the tokens whose loss, or whose weight under cispo, is the clipped one."""


@torch.no_grad()
def policy_figures(algorithm: Algorithm, batch: PolicyBatch) -> dict[str, torch.Tensor]:
    """Figures of a micro-batch as means over its tokens, 0-dimensional; nan without any.

    Returns:
        `ratio` (1 before the first update of a rollout), `clip_fraction`, `approx_kl` (of the policy that sampled to
        the present one), `entropy` (as given, or estimated); with a reference `kl`, the k3 estimate of the policy to
        it; with weights `correction_weight`.
    """
    batch = without_padding(batch)
    figures = policy_metrics(batch.logprobs, batch.logprobs_old, batch.advantages, batch.mask)
    clipped = CLIPPED[algorithm.policy_loss](algorithm, batch).to(batch.logprobs.dtype)
    entropy = estimated_entropy(batch.logprobs) if batch.entropy is None else batch.entropy
    figures |= {"clip_fraction": masked_mean(clipped, batch.mask), "entropy": masked_mean(entropy, batch.mask)}
    if batch.logprobs_ref is not None:
        figures["kl"] = masked_mean(kl_k3(batch.logprobs, batch.logprobs_ref), batch.mask)
    if batch.weights is not None:
        figures["correction_weight"] = masked_mean(batch.weights, batch.mask)
    return figures
