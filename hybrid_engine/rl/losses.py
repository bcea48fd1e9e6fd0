"""Losses per token, before any mean is taken: PPO's, and the policy losses of the GRPO family; metrics of an update.

The losses do not take a mask: aggregation drops values outside of it. Log-probabilities there must be finite all the
same (0 by convention), because 0 * inf in the backward pass is nan.
"""

import torch
import torch.distributed as dist

from hybrid_engine.rl.advantages import masked_mean, moments


def ppo_policy_loss(
    logprobs: torch.Tensor,
    logprobs_old: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """The clipped surrogate loss of each token.

        max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high)),  ratio = exp(logprobs - logprobs_old)

    With `dual_clip` = c the loss of a token with A < 0 is at most -A * c, whatever its ratio.

    Args:
        logprobs: `[B, T]`, of the policy being trained; the only argument that carries a gradient.
        logprobs_old: `[B, T]`, of the policy that sampled.
        advantages: `[B, T]`.
        clip_low: how far below 1 the ratio counts.
        clip_high: how far above 1 the ratio counts.
        dual_clip: c above 1, or None for none.

    Returns:
        `[B, T]`, to be minimized.

    Source: Schulman et al., arXiv 1707.06347, equation 7; dual clip: Ye et al., arXiv 1912.09729, equation 5.
    """
    check_same_shape(logprobs, logprobs_old, advantages)
    assert dual_clip is None or dual_clip > 1, f"{dual_clip=}"
    loss = clipped_loss(torch.exp(logprobs - logprobs_old), advantages, clip_low, clip_high)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)


def clipped_loss(ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high)), of the shape of both tensors."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))


def is_clipped(ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """Bool: where `clipped_loss` takes the clipped side, whose gradient is 0."""
    return -advantages * ratio.clamp(1 - clip_low, 1 + clip_high) > -advantages * ratio


@torch.no_grad()
def policy_metrics(
    logprobs: torch.Tensor,
    logprobs_old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> dict[str, torch.Tensor]:
    """Distance of the policy from the one that sampled, as means over the response tokens.

    Args:
        logprobs, logprobs_old, advantages, clip_low, clip_high: as in `ppo_policy_loss`.
        mask: `[B, T]` bool, True on response tokens.

    Returns:
        Scalars `clip_fraction` (tokens whose loss is the clipped one), `approx_kl` (the k3 estimate of
        KL(old || new): ratio - 1 - log ratio) and `ratio` (1 before the first update of a rollout).
    """
    check_same_shape(logprobs, logprobs_old, advantages)
    log_ratio = logprobs - logprobs_old
    ratio = torch.exp(log_ratio)
    return {
        "clip_fraction": masked_mean(is_clipped(ratio, advantages, clip_low, clip_high).to(ratio.dtype), mask),
        "approx_kl": masked_mean(torch.expm1(log_ratio) - log_ratio, mask),
        "ratio": masked_mean(ratio, mask),
    }


def clipped_value_loss(
    values: torch.Tensor, values_old: torch.Tensor, returns: torch.Tensor, clip: float
) -> torch.Tensor:
    """The clipped squared error of each token's value, with the factor one half.

        1/2 * max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2)

    Args:
        values: `[B, T]`, of the value function being trained; the only argument that carries a gradient.
        values_old: `[B, T]`, of the value function at the time of the rollout.
        returns: `[B, T]`, as from `gae`.
        clip: how far from `values_old` a value counts, in units of the reward.

    Returns:
        `[B, T]`, to be minimized.

    Source: openai/baselines, `ppo2/model.py`.
    """
    check_same_shape(values, values_old, returns)
    clipped = values_old + (values - values_old).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


@torch.no_grad()
def explained_variance(
    values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The fraction of the returns' variance that the values explain: 1 - Var(returns - values) / Var(returns).

    1 is a perfect value function, 0 no better than a constant; not finite where the returns do not vary.

    Args:
        values: `[B, T]`.
        returns: `[B, T]`.
        mask: `[B, T]` bool, True on response tokens.
        group: collective over these processes, each of which must make the call; None uses this process's tokens alone.
    """
    check_same_shape(values, returns)
    return 1 - moments(returns - values, mask, group).squares / moments(returns, mask, group).squares


def check_same_shape(first: torch.Tensor, *others: torch.Tensor) -> None:
    """Raises AssertionError unless all have one shape: nothing is broadcast."""
    shapes = [tuple(tensor.shape) for tensor in (first, *others)]
    assert len(set(shapes)) == 1, f"{shapes=}"


def reinforce_loss(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """-A * log pi: the policy gradient itself, right for one update on what the policy has just sampled.

    Source: Williams, "Simple Statistical Gradient-Following Algorithms" (1992), section 4.
    """
    check_same_shape(logprobs, advantages)
    return -advantages * logprobs


def gspo_loss(
    logprobs: torch.Tensor,
    logprobs_old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """The clipped surrogate with one ratio per sequence: the geometric mean of those of its tokens.

        max(-A * s, -A * clip(s, 1 - clip_low, 1 + clip_high)),  s = exp(mean_t(logprobs - logprobs_old))

    Source: Zheng et al., "GSPO", arXiv 2507.18071, equations 5 to 7 (their bounds are 3e-4 and 4e-4).
    """
    check_same_shape(logprobs, logprobs_old, advantages, mask)
    ratio = mean_ratio(logprobs, logprobs_old, mask).expand_as(logprobs)
    return clipped_loss(ratio, advantages, clip_low, clip_high)


def sequence_clip_loss(
    logprobs: torch.Tensor,
    logprobs_old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """The clipped surrogate of whole sequences: the ratio is the product of those of its tokens.

    The sequence's loss is distributed equally over its tokens, so that the mean over sequences of token sums
    (`seq_mean_token_sum`) is the mean over sequences. Source: TRL, `rloo_trainer.py`, _compute_loss.
    """
    check_same_shape(logprobs, logprobs_old, advantages, mask)
    ratio = product_ratio(logprobs, logprobs_old, mask).expand_as(logprobs)
    return clipped_loss(ratio, advantages, clip_low, clip_high) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def cispo_loss(
    logprobs: torch.Tensor,
    logprobs_old: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """REINFORCE weighted by the clipped ratio, which carries no gradient: no token loses its gradient by the clip.

        -A * stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * log pi

    Source: MiniMax, "MiniMax-M1", arXiv 2506.13585, equations 4 and 5; with clip_low = 1 there is no lower bound.
    """
    check_same_shape(logprobs, logprobs_old, advantages)
    weight = torch.exp(logprobs - logprobs_old).clamp(1 - clip_low, 1 + clip_high)
    return -advantages * weight.detach() * logprobs


def mean_ratio(logprobs: torch.Tensor, logprobs_old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[B, 1]`: the geometric mean of the probability ratios of a sequence's tokens; 1 without a token."""
    log_ratio = torch.where(mask, logprobs - logprobs_old, 0.0).sum(dim=1, keepdim=True)
    return torch.exp(log_ratio / mask.sum(dim=1, keepdim=True).clamp(min=1))


def product_ratio(logprobs: torch.Tensor, logprobs_old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[B, 1]`: the probability ratio of each sequence; 1 without a token."""
    return torch.where(mask, logprobs - logprobs_old, 0.0).sum(dim=1, keepdim=True).exp()
