"""The policy losses of the GRPO family other than PPO's clipped one (`losses.py`), per token, before any mean is taken.

B: sampled responses, T: response tokens. `logprobs` is of the policy being trained and carries the only gradient,
`logprobs_old` of the policy that sampled, `advantages` weigh the tokens: `[B, T]` each, finite everywhere (0 outside
the mask by convention). A mask is bool and True on response tokens. Losses are `[B, T]`, to be minimized.
"""

import torch

from hybrid_engine.rl.losses import check_same_shape, clipped_loss


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
