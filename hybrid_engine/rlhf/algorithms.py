"""GRPO's family as an `Algorithm` defines it: an advantage per token from the scores, and the loss of a policy update.

N: responses, G: samples of each prompt (neighboring rows), T: response tokens.

    score -> minus the sequence's KL -> minus the group's baseline, over the group's scale   one number per response
          -> on its tokens, minus each token's KL, summed from the token on                  one number per token
          -> minus the batch's mean, over the batch's deviation                              over all processes

The loss is policy loss, KL and entropy per token, then their mean. The metrics that are logged with the loss, and a
description of the algorithm's choices, are here too.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from math import inf
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hybrid_engine.config.checks import flag
from hybrid_engine.rl import correction
from hybrid_engine.rl.advantages import (
    Moments,
    batch_std,
    decoupled_rewards,
    group_mean,
    group_mean_scale,
    group_std,
    leave_one_out_mean,
    leave_one_out_std,
    masked_mean,
    moments,
    normalised_steps,
    returns_to_go,
    scaled_difference,
    token_rewards,
    whitening_deviation,
    whitening_deviation_biased,
)
from hybrid_engine.rl.estimates import (
    adaptive_entropy_coefficient,
    adaptive_kl_coefficient,
    estimated_entropy,
    importance_weighted,
    kl_k1,
    kl_k1_with_k2_gradient,
    kl_k2,
    kl_k3,
    kl_k3_with_k2_gradient,
)
from hybrid_engine.rl.losses import (
    StepCounts,
    VespoShape,
    cispo_loss,
    clip_cov_loss,
    dppo_kl_loss,
    dppo_kl_masked,
    dppo_tv_loss,
    dppo_tv_masked,
    gmpo_loss,
    gspo_loss,
    is_clipped,
    kl_cov_loss,
    mean_ratio,
    policy_metrics,
    ppo_policy_loss,
    product_ratio,
    reinforce_loss,
    sapo_loss,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_by_length,
    sequence_clip_loss,
    token_mean,
    token_sum_by_length,
    vespo_loss,
)
from hybrid_engine.rlhf.options.algorithm import COVARIANCE_LOSSES, UNCLIPPED_LOSSES, Algorithm, preset_choices

KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
    "k1+": kl_k1_with_k2_gradient,
    "k3+": kl_k3_with_k2_gradient,
}
AGGREGATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, StepCounts], torch.Tensor]] = {
    "token-mean": lambda loss, mask, step: token_mean(loss, mask, step.num_tokens),
    "sequence-mean-token-mean": lambda loss, mask, step: seq_mean_token_mean(loss, mask, step.num_sequences),
    "sequence-mean-token-sum": lambda loss, mask, step: seq_mean_token_sum(loss, mask, step.num_sequences),
    "token-sum-by-length": lambda loss, mask, step: token_sum_by_length(loss, mask, step.max_length),
    "sequence-mean-token-sum-by-length": lambda loss, mask, step: seq_mean_token_sum_by_length(
        loss, mask, step.num_sequences, step.max_length
    ),
}
Correction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, float], torch.Tensor]
CORRECTIONS: dict[str, Correction] = {
    "truncated": correction.truncated,
    "masked": correction.masked,
    "sequence-truncated": correction.sequence_truncated,
    "sequence-masked": correction.sequence_masked,
    "geometric-truncated": correction.geometric_truncated,
    "geometric-masked": correction.geometric_masked,
}
Cause = Callable[[Algorithm], str | None]
BATCH_BASELINES = ("batch-mean", "group-then-batch-mean")
"""The baselines that subtract the mean over the batch's tokens from each token."""
BATCH_SCALES: dict[str, Callable[[Moments], torch.Tensor]] = {
    "batch-whiten": whitening_deviation,
    "batch-whiten-biased": whitening_deviation_biased,
}
"""The scales that are computed over the batch's tokens."""


def _nothing(rewards: torch.Tensor) -> torch.Tensor:
    return rewards.new_zeros(())


def _one(algorithm: Algorithm, rewards: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return rewards.new_ones(())


BASELINES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "group-mean": group_mean,
    "leave-one-out": leave_one_out_mean,
    "batch-mean": _nothing,
    "group-then-batch-mean": group_mean,
    "none": _nothing,
}
"""The value that is subtracted from `[B, G]` scores; the mean of the batch is subtracted from the tokens later."""


SCALES: dict[str, Callable[[Algorithm, torch.Tensor, dist.ProcessGroup | None], torch.Tensor]] = {
    "group-std": lambda a, rewards, _: group_std(rewards, a.scale_divisor, a.scale_eps),
    "leave-one-out-std": lambda a, rewards, _: leave_one_out_std(rewards, a.scale_divisor, a.scale_eps),
    "group-mean": lambda a, rewards, _: group_mean_scale(rewards),
    "batch-std": lambda a, rewards, group: batch_std(rewards, a.scale_eps, group),
    "batch-whiten": _one,
    "batch-whiten-biased": _one,
    "none": _one,
}
"""The divisor of `[B, G]` differences; the deviation of the batch's tokens comes later."""


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
    reward_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The advantage of each response token.

    Args:
        algorithm: the choices.
        scores: `[N]` fp32, the reward of each response; nan for a response without one, which gets advantages of 0.
            Where each reward is normalized by itself, `[N, K]`: the K rewards of each response, nan where one does not
            judge it.
        group_size: G; rows i * G to (i + 1) * G are samples of one prompt, and G divides N.
        logprobs_old: `[N, T]`, of the policy that sampled.
        logprobs_ref: `[N, T]`, of the reference; read where the KL counts in the reward.
        mask: `[N, T]` bool, all response tokens, including those of responses that the loss leaves out.
        kl_coef: the present weight of the KL.
        process_group: collective over these processes wherever a statistic is the batch's; None for one process.
        reward_weights: `[K]`, of rewards `[N, K]`; None for 1 each.

    Returns:
        `[N, T]` in the dtype of `scores`, 0 outside the mask.
    """
    assert len(scores) % group_size == 0, f"{len(scores)=} {group_size=}"
    mask = mask & ~scores.isnan().view(len(scores), -1).all(dim=1, keepdim=True)
    kl = reward_kl(algorithm, logprobs_old, logprobs_ref, mask).to(scores.dtype) * kl_coef

    def normalise(rewards: torch.Tensor) -> torch.Tensor:
        baseline, scale = BASELINES[algorithm.baseline](rewards), SCALES[algorithm.scale]
        return scaled_difference(rewards, baseline, scale(algorithm, rewards, process_group))

    if algorithm.is_decoupled:
        weights = scores.new_ones(scores.shape[1]) if reward_weights is None else reward_weights
        grouped = scores.view(-1, group_size, scores.shape[1])
        decoupled = decoupled_rewards(grouped, weights, normalise, algorithm.scale_eps, process_group)
        centred = decoupled.flatten().to(scores.dtype)
    else:
        penalty = kl.sum(dim=1) if algorithm.kl_place == "reward" else 0.0
        centred = normalise((scores - penalty).view(-1, group_size)).flatten()

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
        ("reward_aggregation", ("sum-then-normalize",)),
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


class PolicyBatch(NamedTuple):
    """Inputs of the loss of a micro-batch; `[N, T]` each, with any values outside the mask."""

    logprobs: torch.Tensor
    """Log-probabilities of the policy that is trained, with their gradient."""
    logprobs_old: torch.Tensor
    """Log-probabilities of the policy that sampled."""
    advantages: torch.Tensor
    """As from `compute_advantages`."""
    mask: torch.Tensor
    """bool, True on the response tokens that count."""
    logprobs_ref: torch.Tensor | None = None
    """Log-probabilities of the reference, if the KL counts in the loss."""
    weights: torch.Tensor | None = None
    """Importance weights, as from `correction_weights`; None for none."""
    entropy: torch.Tensor | None = None
    """Entropy of the policy's distributions, with its gradient (`token_entropy`), for a bonus; None: estimated."""
    logprobs_sampler: torch.Tensor | None = None
    """Log-probabilities of the sampler, where they are not `logprobs_old`, the trainer's of the same weights."""

    high_entropy: torch.Tensor | None = None
    """bool, True on the tokens that the policy loss learns from, as from `choose_tokens`; None for all."""
    covariant: torch.Tensor | None = None
    """bool, True on the tokens of high covariance that the policy loss treats differently, as from `choose_tokens`."""

    @property
    def sampled(self) -> torch.Tensor:
        """`[N, T]`: the log-probabilities that the tokens were drawn by."""
        return self.logprobs_old if self.logprobs_sampler is None else self.logprobs_sampler

    @property
    def from_sampler(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first three fields with the sampler's log-probabilities in place of the old ones."""
        return self.logprobs, self.sampled, self.advantages

    @property
    def chosen(self) -> torch.Tensor:
        """`covariant`, where the policy loss needs it."""
        assert self.covariant is not None, "a loss of covariant tokens without choose_tokens"
        return self.covariant


TokenValues = Callable[[Algorithm, PolicyBatch], torch.Tensor]
POLICY_LOSSES: dict[str, TokenValues] = {
    "clip": lambda a, b: ppo_policy_loss(*b[:3], a.clip_low, a.clip_high, a.dual_clip or None),
    "gspo": lambda a, b: gspo_loss(*b[:4], a.clip_low, a.clip_high),
    "cispo": lambda a, b: cispo_loss(*b[:3], a.clip_low, a.clip_high),
    "reinforce": lambda a, b: reinforce_loss(b.logprobs, b.advantages),
    "sequence-clip": lambda a, b: sequence_clip_loss(*b[:4], a.clip_low, a.clip_high),
    "sapo": lambda a, b: sapo_loss(*b[:3], a.sapo_temperature_pos, a.sapo_temperature_neg),
    "gmpo": lambda a, b: gmpo_loss(*b[:4], a.clip_low, a.clip_high),
    "dppo": lambda a, b: dppo_tv_loss(*b.from_sampler, a.clip_low, a.clip_high, a.ratio_cap or inf),
    "dppo-kl": lambda a, b: dppo_kl_loss(*b.from_sampler, a.clip_low, a.clip_high, a.ratio_cap or inf),
    "vespo": lambda a, b: vespo_loss(
        *b.from_sampler, b.mask, VespoShape(a.vespo_k_pos, a.vespo_lambda_pos, a.vespo_k_neg, a.vespo_lambda_neg)
    ),
    "clip-cov": lambda a, b: clip_cov_loss(*b[:3], b.chosen, a.clip_low, a.clip_high),
    "kl-cov": lambda a, b: kl_cov_loss(*b[:3], b.chosen, a.cov_kl_coef),
}
"""`[N, T]`: the loss of each token by the algorithm's choices and the tokens of a batch."""


@torch.no_grad()
def choose_tokens(
    algorithm: Algorithm,
    batch: PolicyBatch,
    entropy: torch.Tensor | None,
    process_group: dist.ProcessGroup | None = None,
) -> PolicyBatch:
    """`batch` with the tokens of a rollout that the algorithm chooses by entropy and by covariance.

    Args:
        algorithm: the choices.
        batch: of a whole rollout.
        entropy: `[N, T]`, of the policy that sampled, in nats; read where `algorithm.top_entropy` is below 1.
        process_group: collective over these processes; None for one process.
    """
    high_entropy = covariant = None
    if algorithm.top_entropy < 1:
        assert entropy is not None, f"{algorithm.top_entropy=} without entropies"
        high_entropy = correction.of_high_entropy(entropy, batch.mask, algorithm.top_entropy, process_group)
    if algorithm.policy_loss in COVARIANCE_LOSSES:
        covariance = correction.covariances(batch.logprobs_old, batch.advantages, batch.mask, process_group)
        if algorithm.policy_loss == "kl-cov":
            covariant = correction.most_covariant(covariance, batch.mask, algorithm.cov_share, process_group)
        else:
            bounds = algorithm.cov_share, algorithm.cov_low, algorithm.cov_high
            covariant = correction.drawn_covariant(covariance, batch.logprobs_old, batch.mask, *bounds, process_group)
    return batch._replace(high_entropy=high_entropy, covariant=covariant)


def counted_tokens(algorithm: Algorithm, batch: PolicyBatch) -> torch.Tensor | None:
    """`[N, T]` bool: the tokens whose policy loss counts; None for all."""
    counted = batch.high_entropy
    if algorithm.off_policy_threshold:
        threshold = algorithm.off_policy_threshold
        within = correction.within_policy(batch.logprobs, batch.sampled, batch.advantages, batch.mask, threshold)
        counted = within if counted is None else within & counted
    return counted


class Coefficients(NamedTuple):
    """The present weights of the loss's terms, which may follow measurements from step to step."""

    kl: float
    entropy: float
    """The entropy's, or the value of its controller."""
    bonus: float
    """The weight of the entropy in the loss: the controller's value while the entropy is low, else 0."""

    @classmethod
    def first(cls, algorithm: Algorithm) -> "Coefficients":
        """The weights of the first step."""
        bonus = 0.0 if algorithm.entropy_target else algorithm.entropy_coef
        return cls(algorithm.kl_coef, algorithm.entropy_coef, bonus)


def policy_objective(
    algorithm: Algorithm, batch: PolicyBatch, step: StepCounts, coefficients: Coefficients
) -> torch.Tensor:
    """This micro-batch's share of the loss of an optimizer step, a scalar to be minimized.

        aggregate(weight * policy_loss where it counts + coefficient * KL + sampler_coef * (log pi / mu)^2
                  - bonus * entropy)

    Args:
        algorithm: the choices.
        batch: the tokens of the micro-batch.
        step: the counts of the whole optimizer step, over all micro-batches and processes (`count_step`): the shares of
            all of them sum to its loss. An engine that averages over micro-batches and processes needs the share times
            their number.
        coefficients: the present weights of the KL and of the entropy.
    """
    batch = without_padding(batch)
    losses = POLICY_LOSSES[algorithm.policy_loss](algorithm, batch)
    if batch.weights is not None:
        losses = losses * batch.weights
    counted = counted_tokens(algorithm, batch)
    if counted is not None:
        losses = torch.where(counted, losses, 0.0)
    if algorithm.kl_place == "loss":
        losses = losses + coefficients.kl * loss_kl(algorithm, batch)
    if algorithm.sampler_coef:
        losses = losses + algorithm.sampler_coef * (batch.logprobs - batch.sampled).square()
    if coefficients.bonus:
        entropy = estimated_entropy(batch.logprobs) if batch.entropy is None else batch.entropy
        losses = losses - coefficients.bonus * entropy
    return AGGREGATIONS[algorithm.aggregation](losses, batch.mask, step)


def without_padding(batch: PolicyBatch) -> PolicyBatch:
    """`batch` with 0 wherever the mask is False, so that nothing there reaches a value or a gradient."""
    return PolicyBatch(
        *(
            value if value is None or value is batch.mask else torch.where(batch.mask, value, value.new_zeros(()))
            for value in batch
        )
    )


def loss_kl(algorithm: Algorithm, batch: PolicyBatch) -> torch.Tensor:
    """`[N, T]`: the KL estimate of each token with its gradient."""
    assert batch.logprobs_ref is not None, "a KL in the loss without a reference"
    estimate = KL_ESTIMATORS[algorithm.kl_estimator](batch.logprobs, batch.logprobs_ref)
    if not algorithm.kl_unbiased:
        return estimate
    return importance_weighted(estimate, batch.logprobs, batch.logprobs_old)


def next_coefficients(
    algorithm: Algorithm, coefficients: Coefficients, figures: Mapping[str, float], num_answers: int
) -> Coefficients:
    """The weights of the next step: fixed, or steered to a target.

    Args:
        algorithm: the choices.
        coefficients: those of the last step.
        figures: of that step, with `kl_per_sequence` (nats per answer) and `entropy` (nats per token) where there is
            a target for them; a coefficient whose figure is absent, as in a step that trained nothing, stays.
        num_answers: answers of that step, over all processes.
    """
    kl, entropy, bonus = coefficients
    if algorithm.kl_target and "kl_per_sequence" in figures:
        kl = adaptive_kl_coefficient(
            kl, figures["kl_per_sequence"], algorithm.kl_target, algorithm.kl_horizon, num_answers
        )
    if algorithm.entropy_target and "entropy" in figures:
        measured, target = figures["entropy"], algorithm.entropy_target
        bounds = algorithm.entropy_change, algorithm.entropy_coef_max
        entropy = adaptive_entropy_coefficient(entropy, measured, target, *bounds)
        bonus = entropy if measured <= target else 0.0
    return Coefficients(kl, entropy, bonus)


def correction_weights(
    algorithm: Algorithm,
    difference: float,
    logprobs_trainer: torch.Tensor,
    logprobs_sampler: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor | None:
    """The weights of the importance correction, `[N, T]`; None if there is nothing to correct.

    Args:
        algorithm: the choices; no correction, or a difference up to its threshold, gives None.
        difference: the measured mean of |logprobs_trainer - logprobs_sampler| over all processes, nats per token.
        logprobs_trainer, logprobs_sampler: `[N, T]`, of the same weights.
        mask: `[N, T]` bool, True on response tokens.
    """
    if algorithm.correction == "none" or difference <= algorithm.correction_threshold:
        return None
    bounds = algorithm.correction_low, algorithm.correction_high
    return CORRECTIONS[algorithm.correction](logprobs_trainer, logprobs_sampler, mask, *bounds)


def _clipped_ratios(algorithm: Algorithm, batch: PolicyBatch) -> torch.Tensor:
    ratio = torch.exp(batch.logprobs - batch.logprobs_old)
    return is_clipped(ratio, batch.advantages, algorithm.clip_low, algorithm.clip_high)


def _clipped_weights(algorithm: Algorithm, batch: PolicyBatch) -> torch.Tensor:
    ratio = torch.exp(batch.logprobs - batch.logprobs_old)
    return ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) != ratio


def _clipped_logarithms(algorithm: Algorithm, batch: PolicyBatch) -> torch.Tensor:
    log_ratio = batch.logprobs - batch.logprobs_old
    is_low = (batch.advantages < 0) & (log_ratio < -algorithm.clip_low)
    return torch.where(batch.advantages > 0, log_ratio > algorithm.clip_high, is_low)


def _nowhere(algorithm: Algorithm, batch: PolicyBatch) -> torch.Tensor:
    return torch.zeros_like(batch.mask)


CLIPPED: dict[str, TokenValues] = {
    "clip": _clipped_ratios,
    "gspo": lambda a, b: is_clipped(mean_ratio(*b[:2], b.mask), b.advantages, a.clip_low, a.clip_high),
    "cispo": _clipped_weights,
    "reinforce": _nowhere,
    "sequence-clip": lambda a, b: is_clipped(product_ratio(*b[:2], b.mask), b.advantages, a.clip_low, a.clip_high),
    "sapo": _nowhere,
    "gmpo": _clipped_logarithms,
    "dppo": lambda a, b: dppo_tv_masked(*b.from_sampler, a.clip_low, a.clip_high),
    "dppo-kl": lambda a, b: dppo_kl_masked(*b.from_sampler, a.clip_low, a.clip_high),
    "vespo": _nowhere,
    "clip-cov": lambda a, b: _clipped_ratios(a, b) | b.chosen,
    "kl-cov": _nowhere,
}
"""`[N, T]` bool: the tokens whose loss, or whose weight under cispo, is clipped, or 0 under dppo."""


@torch.no_grad()
def policy_figures(algorithm: Algorithm, batch: PolicyBatch) -> dict[str, torch.Tensor]:
    """Metrics of a micro-batch as 0-dimensional means over its tokens; nan without any token.

    Returns:
        `ratio` (1 before the first update of a rollout), `clip_fraction`, `approx_kl` (from the policy that sampled to
        the present one), `entropy` (as given, or estimated); with a reference also `kl`, the k3 estimate of the
        policy's KL to it; with weights also `correction_weight`; where tokens are left out of the policy loss also
        `counted_share`, the share of those that count; with a covariance also `covariant_share`.
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
    shares = {"counted_share": counted_tokens(algorithm, batch), "covariant_share": batch.covariant}
    dtype = batch.logprobs.dtype
    return figures | {
        name: masked_mean(chosen.to(dtype), batch.mask) for name, chosen in shares.items() if chosen is not None
    }


def _beside(cause: str, has_effect: Callable[[Algorithm], Any]) -> Cause:
    """Fills the algorithm's choices into `cause`; the result is None where `has_effect`."""
    return lambda algorithm: None if has_effect(algorithm) else cause.format_map(vars(algorithm))


IDLE: dict[str, Cause] = {
    "scale_divisor": _beside("--scale {scale}", lambda a: a.scale in ("group-std", "leave-one-out-std")),
    "scale_eps": _beside("--scale {scale}", lambda a: a.scale.endswith("-std")),
    "clip_low": _beside("--policy-loss {policy_loss}", lambda a: a.policy_loss not in UNCLIPPED_LOSSES),
    "clip_high": _beside("--policy-loss {policy_loss}", lambda a: a.policy_loss not in UNCLIPPED_LOSSES),
    "ratio_cap": _beside("--policy-loss {policy_loss}", lambda a: a.policy_loss in ("dppo", "dppo-kl")),
    **{
        name: _beside("--policy-loss {policy_loss}", lambda a: a.policy_loss == "sapo")
        for name in ("sapo_temperature_pos", "sapo_temperature_neg")
    },
    **{
        name: _beside("--policy-loss {policy_loss}", lambda a: a.policy_loss == "vespo")
        for name in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
    },
    **{
        name: _beside("--policy-loss {policy_loss}", lambda a: a.policy_loss == "clip-cov")
        for name in ("cov_low", "cov_high")
    },
    "cov_share": _beside("--policy-loss {policy_loss}", lambda a: a.policy_loss in COVARIANCE_LOSSES),
    "cov_kl_coef": _beside("--policy-loss {policy_loss}", lambda a: a.policy_loss == "kl-cov"),
    "entropy_change": _beside("--entropy-target {entropy_target}", lambda a: a.entropy_target),
    "entropy_coef_max": _beside("--entropy-target {entropy_target}", lambda a: a.entropy_target),
    "kl_estimator": _beside("--kl-place {kl_place}", lambda a: a.needs_reference),
    "kl_horizon": _beside("--kl-target {kl_target}", lambda a: a.kl_target),
    "overlong_factor": _beside("--overlong-buffer {overlong_buffer}", lambda a: a.overlong_buffer),
    "correction_low": _beside("--correction {correction}", lambda a: a.correction != "none"),
    "correction_high": _beside("--correction {correction}", lambda a: a.correction != "none"),
    "correction_threshold": _beside("--correction {correction}", lambda a: a.correction != "none"),
}
"""The choice that makes an option ineffective; None where the option has an effect."""


def describe(algorithm: Algorithm) -> list[str]:
    """Lines that say what the preset sets, what replaces a choice of the preset, and what has no effect."""
    preset, chosen = algorithm.preset, preset_choices(algorithm.preset)
    lines = [f"preset {preset}: {as_options(chosen)}" if preset else f"no preset: {as_options(all_choices(algorithm))}"]
    lines += [
        f"{as_options({name: getattr(algorithm, name)})} in place of {value} of preset {preset}"
        for name, value in chosen.items()
        if getattr(algorithm, name) != value
    ]
    return lines + idle_lines(algorithm, chosen)


def all_choices(algorithm: Algorithm) -> dict[str, Any]:
    """The choices that have an effect, by field name."""
    names = [field.name for field in fields(algorithm) if field.name != "preset"]
    return {name: getattr(algorithm, name) for name in names if name not in IDLE or not IDLE[name](algorithm)}


def idle_lines(algorithm: Algorithm, chosen: Mapping[str, Any]) -> list[str]:
    """A line for each choice that is neither the default nor the preset's, and has no effect with the others."""
    usual = {field.name: field.default for field in fields(algorithm)} | dict(chosen)
    return [
        f"{as_options({name: getattr(algorithm, name)})} has no effect with {cause(algorithm)}"
        for name, cause in IDLE.items()
        if getattr(algorithm, name) != usual[name] and cause(algorithm)
    ]


def as_options(choices: Mapping[str, Any]) -> str:
    """The choices as they would be typed."""
    return " ".join(f"{flag(name)} {value}" for name, value in choices.items())
