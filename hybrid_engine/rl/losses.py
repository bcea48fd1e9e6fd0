"""Losses of a policy: PPO's and those of the GRPO family per token, metrics of an update, and the mean of a whole step.

The losses do not take a mask: aggregation drops values outside of it. Log-probabilities there must be finite all the
same (0 by convention), because 0 * inf in the backward pass is nan.

Each aggregation returns this micro-batch's share of the step's loss: the caller passes the number of tokens or
sequences of the whole optimizer step, over all micro-batches and all processes, so the shares sum to the same loss
however the rows are split. Where the engine averages gradients over processes, or divides by the number of
micro-batches, the caller multiplies by that number.

B: sampled responses, T: response tokens. A mask is True on response tokens.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from hybrid_engine.rl.advantages import masked_mean, moments, sum_over_processes


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


def sapo_loss(
    logprobs: torch.Tensor,
    logprobs_old: torch.Tensor,
    advantages: torch.Tensor,
    temperature_pos: float,
    temperature_neg: float,
) -> torch.Tensor:
    """A smooth gate in place of the clip: the weight of a token's gradient falls with its ratio's distance from 1.

        -A * 4 / tau * sigmoid(tau * (ratio - 1)),  tau = temperature_pos where A > 0, else temperature_neg

    Source: Gao et al., "Soft Adaptive Policy Optimization", arXiv 2511.20347; its temperatures are 1 and 1.05 (TRL,
    `grpo_config.py`; verl, `core_algos.py`, "sapo").
    """
    check_same_shape(logprobs, logprobs_old, advantages)
    temperature = torch.where(advantages > 0, torch.full_like(logprobs, temperature_pos), temperature_neg)
    gate = torch.sigmoid(temperature * torch.expm1(logprobs - logprobs_old)) * 4 / temperature
    return -advantages * gate


def gmpo_loss(
    logprobs: torch.Tensor,
    logprobs_old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """The geometric mean of a sequence's ratios, each clipped on the side to which its advantage pushes it.

        -A * exp(mean_t c_t),  c = min(log ratio, clip_high) where A > 0, else max(log ratio, -clip_low)

    The bounds are of the logarithm, 0.4 in the paper, which takes the mean over sequences (`seq_mean_token_mean`).

    Source: Zhao et al., "Geometric-Mean Policy Optimization", arXiv 2507.20673; TRL, `gmpo_trainer.py`; verl,
    `core_algos.py`, "geo_mean".
    """
    check_same_shape(logprobs, logprobs_old, advantages, mask)
    log_ratio = logprobs - logprobs_old
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    return -advantages * mean_ratio(clipped, torch.zeros_like(clipped), mask)


def dppo_tv_loss(
    logprobs: torch.Tensor,
    logprobs_sampler: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    ratio_cap: float,
) -> torch.Tensor:
    """REINFORCE weighted by the ratio, 0 for tokens whose probability has left its trust region.

        -A * stop_gradient(min(ratio, ratio_cap)) * M * log pi

    M is 0 where A > 0 and pi - mu > clip_high, and where A <= 0 and mu - pi > clip_low: |pi - mu| is the total
    variation of the token against all others.

    Args:
        logprobs: `[B, T]`, of the policy being trained, pi; the only argument that carries a gradient.
        logprobs_sampler: `[B, T]`, of the sampler, mu.
        advantages: `[B, T]`.
        clip_low, clip_high: bounds of the divergence.
        ratio_cap: largest weight.

    Source: Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv 2602.04879 (DPPO-Binary-TV);
    verl, `core_algos.py`, "dppo_tv"; bounds 0.15 and cap 20: TRL, `dppo_config.py`.
    """
    left = dppo_tv_masked(logprobs, logprobs_sampler, advantages, clip_low, clip_high)
    return _weighted_by_ratio(logprobs, logprobs_sampler, advantages, left, ratio_cap)


def dppo_kl_loss(
    logprobs: torch.Tensor,
    logprobs_sampler: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    ratio_cap: float,
) -> torch.Tensor:
    """`dppo_tv_loss` with the KL of the token against all others in place of the total variation.

        mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))

    Source: as `dppo_tv_loss` (DPPO-Binary-KL; verl, "dppo_kl"); bounds 0.05: TRL, `dppo_config.py`.
    """
    left = dppo_kl_masked(logprobs, logprobs_sampler, advantages, clip_low, clip_high)
    return _weighted_by_ratio(logprobs, logprobs_sampler, advantages, left, ratio_cap)


@torch.no_grad()
def dppo_tv_masked(
    logprobs: torch.Tensor, logprobs_sampler: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """Bool: the tokens that `dppo_tv_loss` leaves out."""
    return _left(logprobs.exp() - logprobs_sampler.exp(), None, advantages, clip_low, clip_high)


@torch.no_grad()
def dppo_kl_masked(
    logprobs: torch.Tensor, logprobs_sampler: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """Bool: the tokens that `dppo_kl_loss` leaves out."""
    moved, before = logprobs.exp() - logprobs_sampler.exp(), logprobs_sampler.exp()
    divergence = before * (logprobs_sampler - logprobs)
    # A token of probability 1 has no others: 0 * log(0 / x) is 0.
    others = (1 - before) * (_log_of_others(logprobs_sampler) - _log_of_others(logprobs))
    return _left(moved, divergence + torch.where(before < 1, others, 0.0), advantages, clip_low, clip_high)


def _log_of_others(logprobs: torch.Tensor) -> torch.Tensor:
    """log(1 - p), the logarithm of the probability of all other tokens; -inf where p is 1."""
    return torch.log(-torch.expm1(logprobs.clamp(max=0)))


def _left(
    moved: torch.Tensor,
    divergence: torch.Tensor | None,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """Bool: where a probability has `moved` with its advantage and is further away than the bound; None: |moved|."""
    distance = moved.abs() if divergence is None else divergence
    return torch.where(advantages > 0, (moved > 0) & (distance > clip_high), (moved < 0) & (distance > clip_low))


def _weighted_by_ratio(
    logprobs: torch.Tensor, logprobs_sampler: torch.Tensor, advantages: torch.Tensor, left: torch.Tensor, cap: float
) -> torch.Tensor:
    check_same_shape(logprobs, logprobs_sampler, advantages)
    weight = torch.exp(logprobs - logprobs_sampler).clamp(max=cap).detach()
    return -advantages * torch.where(left, 0.0, weight) * logprobs


class VespoShape(NamedTuple):
    """The exponents of the weight of `vespo_loss`."""

    k_pos: float
    """power of the ratio where A >= 0"""
    lambda_pos: float
    """rate of the decay where A >= 0"""
    k_neg: float
    """power of the ratio where A < 0"""
    lambda_neg: float
    """rate of the decay where A < 0"""


def vespo_loss(
    logprobs: torch.Tensor,
    logprobs_sampler: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    shape: VespoShape,
) -> torch.Tensor:
    """REINFORCE with one weight per sequence, 1 on-policy and near 0 far away from it on both sides.

        -A * stop_gradient(phi(w)) * log pi,  phi(w) = w^k * exp(lambda * (1 - w)),  w = prod_t pi / mu

    Args:
        logprobs: `[B, T]`, of the policy being trained, pi; the only argument that carries a gradient.
        logprobs_sampler: `[B, T]`, of the sampler, mu.
        advantages: `[B, T]`.
        mask: `[B, T]` bool.
        shape: k and lambda by the sign of A.

    Source: Shen et al., "VESPO", arXiv 2602.10693; TRL, `grpo_trainer.py`, get_gamma_weights: k and lambda are 2 and 3
    where A >= 0, 3 and 2 where A < 0.
    """
    check_same_shape(logprobs, logprobs_sampler, advantages, mask)
    log_ratio = torch.where(mask, logprobs - logprobs_sampler, 0.0).sum(dim=1, keepdim=True).detach()
    power = torch.where(advantages >= 0, torch.full_like(log_ratio, shape.k_pos), shape.k_neg)
    decay = torch.where(advantages >= 0, torch.full_like(log_ratio, shape.lambda_pos), shape.lambda_neg)
    return -advantages * torch.exp(power * log_ratio - decay * torch.expm1(log_ratio)) * logprobs


def clip_cov_loss(
    logprobs: torch.Tensor,
    logprobs_old: torch.Tensor,
    advantages: torch.Tensor,
    chosen: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """The clipped surrogate, 0 on the tokens that are `chosen` (`[B, T]` bool, as from `drawn_covariant`).

    Source: Cui et al., "The Entropy Mechanism of Reinforcement Learning", arXiv 2505.22617, section 4.2 (Clip-Cov).
    """
    check_same_shape(logprobs, logprobs_old, advantages, chosen)
    return torch.where(chosen, 0.0, clipped_loss(torch.exp(logprobs - logprobs_old), advantages, clip_low, clip_high))


def kl_cov_loss(
    logprobs: torch.Tensor,
    logprobs_old: torch.Tensor,
    advantages: torch.Tensor,
    chosen: torch.Tensor,
    kl_coef: float,
) -> torch.Tensor:
    """The surrogate without a clip, with a penalty on the tokens that are `chosen` (as from `most_covariant`).

        -A * ratio + kl_coef * |log ratio| where chosen

    Source: Cui et al., arXiv 2505.22617, section 4.2 (KL-Cov); the estimate of the KL is that of their code and of
    verl, `core_algos.py`, "kl_cov".
    """
    check_same_shape(logprobs, logprobs_old, advantages, chosen)
    log_ratio = logprobs - logprobs_old
    return -advantages * torch.exp(log_ratio) + torch.where(chosen, kl_coef * log_ratio.abs(), 0.0)


def mean_ratio(logprobs: torch.Tensor, logprobs_old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[B, 1]`: the geometric mean of the probability ratios of a sequence's tokens; 1 without a token."""
    log_ratio = torch.where(mask, logprobs - logprobs_old, 0.0).sum(dim=1, keepdim=True)
    return torch.exp(log_ratio / mask.sum(dim=1, keepdim=True).clamp(min=1))


def product_ratio(logprobs: torch.Tensor, logprobs_old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[B, 1]`: the probability ratio of each sequence; 1 without a token."""
    return torch.where(mask, logprobs - logprobs_old, 0.0).sum(dim=1, keepdim=True).exp()


class StepCounts(NamedTuple):
    """The counts of one optimizer step, over all of its micro-batches and all processes."""

    num_tokens: int
    """True entries of the masks"""
    num_sequences: int
    """rows with a token"""
    max_length: int
    """tokens that a response may have, a constant of the run"""


@torch.no_grad()
def count_step(mask: torch.Tensor, max_length: int, group: dist.ProcessGroup | None = None) -> StepCounts:
    """The counts of an optimizer step from this process's rows of it, `[B, T]` bool; collective over `group`.

    At least 1 each, so that a step whose responses are all masked has the loss 0.
    """
    local = torch.stack([mask.sum(), mask.any(dim=1).sum()])
    num_tokens, num_sequences = sum_over_processes(local, group).clamp(min=1).tolist()
    return StepCounts(num_tokens, num_sequences, max_length)


def token_mean(loss: torch.Tensor, mask: torch.Tensor, num_tokens: int | torch.Tensor) -> torch.Tensor:
    """The mean over all tokens of the step: every token has the same weight.

    Args:
        loss: `[B, T]`.
        mask: `[B, T]` bool.
        num_tokens: True entries of the masks of the whole optimizer step.

    Returns:
        A scalar.
    """
    return _masked(loss, mask).sum() / num_tokens


def seq_mean_token_mean(loss: torch.Tensor, mask: torch.Tensor, num_sequences: int | torch.Tensor) -> torch.Tensor:
    """Every sequence of the step has the same weight, and within it every token.

    Args:
        loss: `[B, T]`.
        mask: `[B, T]` bool; a row without a token adds nothing and must not be counted.
        num_sequences: rows with a token in the whole optimizer step.

    Returns:
        A scalar.
    """
    token_counts = mask.sum(dim=1).clamp(min=1)  # [B]
    return (_masked(loss, mask).sum(dim=1) / token_counts).sum() / num_sequences


def seq_mean_token_sum(loss: torch.Tensor, mask: torch.Tensor, num_sequences: int | torch.Tensor) -> torch.Tensor:
    """The mean over the step's sequences of the sum over their tokens: longer sequences weigh more.

    Args:
        loss: `[B, T]`.
        mask: `[B, T]` bool.
        num_sequences: rows with a token in the whole optimizer step.

    Returns:
        A scalar.
    """
    return _masked(loss, mask).sum() / num_sequences


def token_sum_by_length(loss: torch.Tensor, mask: torch.Tensor, max_length: int) -> torch.Tensor:
    """The sum over all tokens of the step, divided by a constant; it grows with the number of sequences.

    Args:
        loss: `[B, T]`.
        mask: `[B, T]` bool.
        max_length: the constant, the number of tokens that a response may have.

    Returns:
        A scalar. Source: verl, `core_algos.py`, "seq-mean-token-sum-norm", before it divided by the number of
        sequences too (0.9.1 does).
    """
    return _masked(loss, mask).sum() / max_length


def seq_mean_token_sum_by_length(
    loss: torch.Tensor, mask: torch.Tensor, num_sequences: int | torch.Tensor, max_length: int
) -> torch.Tensor:
    """The mean over the step's sequences of the sum over their tokens, divided by a constant: no bias towards a length.

    Args:
        loss: `[B, T]`.
        mask: `[B, T]` bool.
        num_sequences: rows with a token in the whole optimizer step.
        max_length: the constant, the number of tokens that a response may have.

    Returns:
        A scalar. Source: Liu et al., "Dr. GRPO", arXiv 2503.20783; TRL, loss_type="dr_grpo".
    """
    return _masked(loss, mask).sum() / (num_sequences * max_length)


def _masked(loss: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    assert loss.ndim == 2 and loss.shape == mask.shape, f"{loss.shape=} {mask.shape=}"
    assert mask.dtype == torch.bool, f"{mask.dtype=}"
    return torch.where(mask, loss, 0.0)
