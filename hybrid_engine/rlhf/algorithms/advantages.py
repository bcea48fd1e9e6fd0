"""Computes an advantage per token from the scores of sampled groups, as an `Algorithm` defines it.

N: responses of this process, G: samples of each prompt (neighboring rows), T: response tokens.

    score -> minus the sequence's KL -> minus the group's baseline, over the group's scale   one number per response
          -> on its tokens, minus each token's KL, summed from the token on                  one number per token
          -> minus the batch's mean, over the batch's deviation                              over all processes
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from hybrid_engine.config.checks import flag
from hybrid_engine.rl.advantages import (
    Moments,
    moments,
    returns_to_go,
    token_rewards,
    whitening_deviation,
    whitening_deviation_biased,
)
from hybrid_engine.rl.group_advantages import (
    batch_std,
    group_mean,
    group_std,
    leave_one_out_mean,
    leave_one_out_std,
    normalised_steps,
    scaled_difference,
)
from hybrid_engine.rlhf.algorithms.objective import KL_ESTIMATORS
from hybrid_engine.rlhf.options.algorithm import Algorithm


def _nothing(rewards: torch.Tensor) -> torch.Tensor:
    return rewards.new_zeros(())


def _one(algorithm: Algorithm, rewards: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return rewards.new_ones(())


def _group_std(algorithm: Algorithm, rewards: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return group_std(rewards, algorithm.scale_divisor, algorithm.scale_eps)


def _leave_one_out_std(algorithm: Algorithm, rewards: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return leave_one_out_std(rewards, algorithm.scale_divisor, algorithm.scale_eps)


def _batch_std(algorithm: Algorithm, rewards: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return batch_std(rewards, algorithm.scale_eps, group)


BASELINES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "group-mean": group_mean,
    "leave-one-out": leave_one_out_mean,
    "batch-mean": _nothing,
    "group-then-batch-mean": group_mean,
    "none": _nothing,
}
"""The value that is subtracted from `[B, G]` scores; the mean of the batch is subtracted from the tokens later."""

SCALES: dict[str, Callable[[Algorithm, torch.Tensor, dist.ProcessGroup | None], torch.Tensor]] = {
    "group-std": _group_std,
    "leave-one-out-std": _leave_one_out_std,
    "batch-std": _batch_std,
    "batch-whiten": _one,
    "batch-whiten-biased": _one,
    "none": _one,
}
"""The divisor of `[B, G]` differences; the deviation of the batch's tokens comes later."""

BATCH_BASELINES = ("batch-mean", "group-then-batch-mean")
"""The baselines that subtract the mean over the batch's tokens from each token."""

BATCH_SCALES: dict[str, Callable[[Moments], torch.Tensor]] = {
    "batch-whiten": whitening_deviation,
    "batch-whiten-biased": whitening_deviation_biased,
}
"""The scales that are computed over the batch's tokens."""


@torch.no_grad()
def compute_advantages(
    algorithm: Algorithm,
    scores: torch.Tensor,
    group_size: int,
    logprobs_old: torch.Tensor,
    logprobs_ref: torch.Tensor | None,
    mask: torch.Tensor,
    kl_coef: float,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The advantage of each response token.

    Args:
        algorithm: the choices.
        scores: `[N]` fp32, the reward of each response; nan for a response without one, which gets advantages of 0.
        group_size: G; rows i * G to (i + 1) * G are samples of one prompt, and G divides N.
        logprobs_old: `[N, T]`, of the policy that sampled.
        logprobs_ref: `[N, T]`, of the reference; read where the KL counts in the reward.
        mask: `[N, T]` bool, all response tokens, including those of responses that the loss leaves out.
        kl_coef: the present weight of the KL.
        process_group: collective over these processes wherever a statistic is the batch's; None for one process.

    Returns:
        `[N, T]` in the dtype of `scores`, 0 outside the mask.
    """
    assert len(scores) % group_size == 0, f"{len(scores)=} {group_size=}"
    mask = mask & ~scores.isnan()[:, None]
    kl = reward_kl(algorithm, logprobs_old, logprobs_ref, mask).to(scores.dtype) * kl_coef
    penalty = kl.sum(dim=1) if algorithm.kl_place == "reward" else 0.0
    rewards = (scores - penalty).view(-1, group_size)
    baseline, scale = BASELINES[algorithm.baseline](rewards), SCALES[algorithm.scale](algorithm, rewards, process_group)
    centred = scaled_difference(rewards, baseline, scale).flatten()

    token_kl = kl if algorithm.kl_place == "token-reward" else torch.zeros_like(kl)
    returns = returns_to_go(rewards_by_token(centred, token_kl, mask), mask, algorithm.gamma)
    return batch_normalised(algorithm, returns, mask, process_group)


@torch.no_grad()
def compute_step_advantages(
    algorithm: Algorithm,
    step_rewards: torch.Tensor,
    group_size: int,
    logprobs_old: torch.Tensor,
    logprobs_ref: torch.Tensor | None,
    mask: torch.Tensor,
    kl_coef: float,
) -> torch.Tensor:
    """The advantage of each response token where rewards belong to the steps of answers, as from `normalised_steps`.

    Args:
        algorithm: the choices, checked by `check_steps`.
        step_rewards: `[N, T]` fp32, on the token that ends each step, nan on the others.
        group_size, logprobs_old, logprobs_ref, mask, kl_coef: as in `compute_advantages`.

    Returns:
        `[N, T]`, 0 outside the mask.
    """
    divisor = algorithm.scale_divisor if algorithm.scale == "group-std" else None
    rewards = normalised_steps(step_rewards, group_size, divisor, algorithm.scale_eps)
    kl = reward_kl(algorithm, logprobs_old, logprobs_ref, mask) * kl_coef
    return returns_to_go(torch.where(mask, rewards - kl, 0.0), mask, algorithm.gamma)


def check_steps(algorithm: Algorithm) -> None:
    """Raises ValueError for choices that have no meaning where a reward scores the steps of an answer."""
    for name, known in (
        ("baseline", ("group-mean",)),
        ("scale", ("group-std", "none")),
        ("kl_place", ("none", "token-reward", "loss")),
        ("overlong_buffer", (0.0,)),
    ):
        value = getattr(algorithm, name)
        if value not in known:
            raise ValueError(
                f"{flag(name)}={value} applies to whole answers, but a --reward scores their steps (arXiv 2402.03300, "
                f"section 4.1.3); use {' or '.join(map(str, known))}, or return one number per answer"
            )


def reward_kl(
    algorithm: Algorithm, logprobs_old: torch.Tensor, logprobs_ref: torch.Tensor | None, mask: torch.Tensor
) -> torch.Tensor:
    """`[N, T]`: the KL estimate of each token where it counts in the reward, 0 elsewhere."""
    if algorithm.kl_place not in ("reward", "token-reward"):
        return torch.zeros_like(logprobs_old)
    assert logprobs_ref is not None, f"{algorithm.kl_place=} without a reference"
    return torch.where(mask, KL_ESTIMATORS[algorithm.kl_estimator](logprobs_old, logprobs_ref), 0.0)


def rewards_by_token(scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`token_rewards` of scores `[N]` and weighted KL `[N, T]`; a row without a token gets 0 everywhere."""
    first = torch.zeros_like(mask)
    first[:, 0] = ~mask.any(dim=1)
    return torch.where(mask, token_rewards(scores, kl, mask | first, 1.0), 0.0)


def batch_normalised(
    algorithm: Algorithm, advantages: torch.Tensor, mask: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """`advantages` `[N, T]` minus the mean of all tokens, over their deviation, where the algorithm has them."""
    is_shifted, scale = algorithm.baseline in BATCH_BASELINES, BATCH_SCALES.get(algorithm.scale)
    if not is_shifted and scale is None:
        return advantages
    found = moments(advantages, mask, group)
    shifted = advantages.double() - (found.mean if is_shifted else 0.0)
    scaled = shifted if scale is None else shifted / scale(found)
    return torch.where(mask, scaled, 0.0).to(advantages.dtype)
