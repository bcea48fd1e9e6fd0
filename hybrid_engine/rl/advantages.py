"""From scores to advantages: rewards by token and length, GAE, whitening, and the GRPO family's baselines and scales.

B: sampled responses, T: response tokens. A mask is True on response tokens. Everything here is a target, so nothing
carries a gradient.

For baselines and scales, B: prompts of this process, G: samples of each prompt. Rewards are `[B, G]`; nan marks a
sample that has none: it counts in no statistic. An advantage is (reward - baseline) / scale, and 0 for a sample without
a reward (`scaled_difference`). Statistics are float64, so that the eps added to a deviation against division by zero
stays smaller than it. In a group of equal rewards every baseline is that reward to the bit, so that its advantages are
0 and not rounding.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

WHITEN_EPS = 1e-8
DIVISORS = {"n": 0, "n-1": 1}
"""The number subtracted from the number of samples to get the divisor of a sum of squares."""


@torch.no_grad()
def token_rewards(scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """The reward of each token: -kl_coef * kl everywhere, and the score on the last response token.

    Args:
        scores: `[B]`, the reward model's score of each response.
        kl: `[B, T]`, the KL estimate of each token (`kl_k1` by convention).
        mask: `[B, T]` bool, with at least one response token in each row.
        kl_coef: weight of the KL penalty.

    Returns:
        `[B, T]`, 0 outside the mask.
    """
    assert kl.ndim == 2 and scores.shape == kl.shape[:1], f"{scores.shape=} {kl.shape=}"
    _check_mask(mask, kl)
    assert bool(mask.any(dim=1).all()), "a row of the mask has no response token to put its score on"
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1, keepdim=True)  # [B, 1]
    penalties = torch.where(mask, -kl_coef * kl, 0.0)
    return penalties.scatter_add(1, last, scores[:, None].to(penalties.dtype))


@torch.no_grad()
def teacher_advantages(
    logprobs_old: torch.Tensor,
    logprobs_teacher: torch.Tensor,
    mask: torch.Tensor,
    coef: float,
    clamp: float | None = None,
) -> torch.Tensor:
    """The advantage of each token from a teacher: minus `coef` times the estimated reverse KL of its distribution.

        A_t = -coef * (log pi_old(y_t) - log pi_teacher(y_t))

    It is neither discounted nor normalised: a token answers for its own distribution alone. Source: Thinking Machines
    Lab, "On-Policy Distillation", 2025; verl's `distillation_ppo_loss` with `use_policy_gradient` and the estimator k1.

    Args:
        logprobs_old: `[B, T]`, of the policy that sampled.
        logprobs_teacher: `[B, T]`.
        mask: `[B, T]` bool.
        coef: weight of the teacher, per nat.
        clamp: bound of the difference, in nats; None: none.

    Returns:
        `[B, T]`, 0 outside the mask.
    """
    _check_mask(mask, logprobs_old)
    differences = logprobs_teacher - logprobs_old
    return torch.where(mask, coef * (differences if clamp is None else differences.clamp(-clamp, clamp)), 0.0)


@torch.no_grad()
def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimates and the returns that the value function is trained on.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}
        R_t     = A_t + V_t

    where t + 1 is the next response token: masked tokens in between (padding, the output of a tool) are skipped. V and
    A are carried across them, and their values are not read. After the last token V = A = 0.

    Args:
        rewards: `[B, T]`, as from `token_rewards`.
        values: `[B, T]`, the value before each token.
        mask: `[B, T]` bool.
        gamma: discount, in [0, 1].
        lam: GAE's lambda, in [0, 1].

    Returns:
        Advantages and returns, each `[B, T]`, 0 outside the mask.

    Source: Schulman et al., arXiv 1506.02438, equations 11 and 16.
    """
    assert rewards.ndim == 2 and rewards.shape == values.shape, f"{rewards.shape=} {values.shape=}"
    _check_mask(mask, rewards)
    next_value = torch.zeros_like(values[:, 0])  # [B]
    next_advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(values)
    for t in reversed(range(rewards.shape[1])):
        present = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(present, values[:, t], next_value)
        next_advantage = torch.where(present, advantage, next_advantage)
        advantages[:, t] = torch.where(present, advantage, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


@torch.no_grad()
def returns_to_go(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """The discounted sum of the rewards from each token on: R_t = r_t + gamma * R_{t+1}, masked tokens are skipped.

    Args:
        rewards: `[B, T]`.
        mask: `[B, T]` bool.
        gamma: discount, in [0, 1].

    Returns:
        `[B, T]`, 0 outside the mask.

    Source: Hu et al., "REINFORCE++", arXiv 2501.03262 (the KL of the tokens to come is in their rewards).
    """
    returns, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
    return returns


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean of `values` where `mask` (bool, of the same shape) is True; nan where it is True nowhere."""
    _check_mask(mask, values)
    return torch.where(mask, values, 0.0).sum() / mask.sum()


@torch.no_grad()
def whiten(
    values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """`values` scaled to variance 1 and, with `shift_mean`, moved to mean 0, over all tokens of the mask.

        (values - mean) / sqrt(variance + 1e-8), the variance with the divisor n - 1, and 0 for a single token

    Args:
        values: `[B, T]`.
        mask: `[B, T]` bool.
        shift_mean: whether the mean is removed (advantages) or added back after scaling (rewards).
        group: collective over these processes, so that the result does not depend on how the rows are
            spread; None uses the rows of this process alone. Every process of the group must call it.

    Returns:
        `[B, T]` in the dtype of `values`, 0 outside the mask.
    """
    found = moments(values, mask, group)
    scaled = torch.where(mask, (values.double() - found.mean) / whitening_deviation(found), 0.0)
    shifted = scaled if shift_mean else torch.where(mask, scaled + found.mean, 0.0)
    return shifted.to(values.dtype)


def _check_mask(mask: torch.Tensor, values: torch.Tensor) -> None:
    assert mask.dtype == torch.bool and mask.shape == values.shape, f"{mask.dtype=} {mask.shape=} {values.shape=}"


class Moments(NamedTuple):
    """The moments that the statistics below are computed from, each 0-dimensional and float64."""

    count: torch.Tensor
    mean: torch.Tensor
    """nan without an entry"""
    squares: torch.Tensor
    """sum of the squared distances from the mean"""


@torch.no_grad()
def moments(values: torch.Tensor, mask: torch.Tensor, group: dist.ProcessGroup | None = None) -> Moments:
    """The moments of `values` where `mask` (bool, of the same shape) is True, over the processes of `group`."""
    assert mask.dtype == torch.bool and mask.shape == values.shape, f"{mask.dtype=} {mask.shape=} {values.shape=}"
    exact = torch.where(mask, values, 0.0).double()
    count, total = sum_over_processes(torch.stack([mask.sum().double(), exact.sum()]), group)
    mean = total / count
    centred = torch.where(mask, exact - mean, 0.0)
    return Moments(count, mean, sum_over_processes(centred.square().sum(), group))


def deviation(found: Moments) -> torch.Tensor:
    """The standard deviation with the divisor n - 1; 0 for a single entry."""
    return (found.squares / (found.count - 1).clamp(min=1)).sqrt()


def whitening_deviation(found: Moments) -> torch.Tensor:
    """sqrt(variance + 1e-8), the variance with the divisor n - 1. Source: verl, `torch_functional.py`."""
    return (found.squares / (found.count - 1).clamp(min=1) + WHITEN_EPS).sqrt()


def whitening_deviation_biased(found: Moments) -> torch.Tensor:
    """sqrt(max(variance, 1e-8)), the variance with the divisor n. Source: OpenRLHF, `experience_maker.py`."""
    return (found.squares / found.count.clamp(min=1)).clamp(min=WHITEN_EPS).sqrt()


def sum_over_processes(local: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sums `local` in place over the processes of `group`, unless that is None, and returns it."""
    if group is not None:
        dist.all_reduce(local, group=group)
    return local


@torch.no_grad()
def gather_values(local: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The values `[n]` of all processes, each of which may have another number; collective over `group`.

    Without a group, `local` itself.
    """
    if group is None:
        return local
    counts = [torch.zeros((), dtype=torch.long, device=local.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, torch.tensor(len(local), device=local.device), group=group)
    padded = local.new_zeros(max(1, *(int(count) for count in counts)))
    padded[: len(local)] = local
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])


def overlong_penalty(lengths: torch.Tensor, max_length: int, buffer: int, factor: float = 1.0) -> torch.Tensor:
    """DAPO's soft overlong punishment, to be added to the reward; equation 13.

        0 up to max_length - buffer tokens, from there linear down to -factor at max_length

    Args:
        lengths: `[B]`, tokens of each response.
        max_length: tokens that a response may have.
        buffer: number of tokens before `max_length` at which the punishment begins.
        factor: its largest value; 1 in the paper.

    Returns:
        `[B]`, at most 0; in the dtype of `lengths` if that is a floating-point dtype, else the default dtype.
    """
    assert 0 < buffer <= max_length, f"{buffer=} {max_length=}"
    return ((max_length - buffer - lengths) / buffer).clamp(-1, 0) * factor


def without_cut_off(mask: torch.Tensor, is_cut_off: torch.Tensor) -> torch.Tensor:
    """The mask `[B, T]`, set to False in rows of responses that were cut off, `[B]` bool (overlong filtering)."""
    assert mask.dtype == is_cut_off.dtype == torch.bool, f"{mask.dtype=} {is_cut_off.dtype=}"
    return mask & ~is_cut_off[:, None]


@torch.no_grad()
def group_mean(rewards: torch.Tensor) -> torch.Tensor:
    """`[B, 1]`: the mean of each group. Source: Shao et al., "DeepSeekMath", arXiv 2402.03300, section 4.1.2."""
    has_reward, exact = _split(rewards)
    mean = exact.sum(dim=1, keepdim=True) / has_reward.sum(dim=1, keepdim=True).clamp(min=1)
    return _within_group(mean, rewards)


@torch.no_grad()
def leave_one_out_mean(rewards: torch.Tensor) -> torch.Tensor:
    """`[B, G]`: for each sample the mean of the group's others; its own reward, and so no advantage, without others.

    Source: Kool et al., "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al., arXiv 2402.14740
    (RLOO).
    """
    others, num_others = _sum_of_others(rewards)
    mean = _within_group(others / num_others.clamp(min=1), rewards)
    return torch.where(num_others > 0, mean, rewards.double())


@torch.no_grad()
def group_std(rewards: torch.Tensor, divisor: str, eps: float) -> torch.Tensor:
    """`[B, 1]`: the standard deviation of each group, plus `eps`.

    Args:
        rewards: `[B, G]`.
        divisor: "n-1" as `torch.std` has it (TRL, verl, OpenRLHF, slime), or "n".
        eps: added to the deviation. verl and slime 1e-6, TRL 1e-4, OpenRLHF 1e-9.
    """
    has_reward, exact = _split(rewards)
    squares = torch.where(has_reward, exact - group_mean(rewards), 0.0).square().sum(dim=1, keepdim=True)
    count = has_reward.sum(dim=1, keepdim=True) - DIVISORS[divisor]
    return (squares / count.clamp(min=1)).sqrt() + eps


@torch.no_grad()
def leave_one_out_std(rewards: torch.Tensor, divisor: str, eps: float) -> torch.Tensor:
    """`[B, G]`: for each sample the standard deviation of the group's others, plus `eps`; 1 where they are all equal.

    A group of two has one other, whose deviation is 0: its advantages are not scaled.

    Args:
        rewards, divisor, eps: as in `group_std`.

    Source: NVIDIA NeMo-RL, `nemo_rl/algorithms/utils.py`, calculate_baseline_and_std_per_prompt (divisor n-1, 1e-6).
    """
    has_reward, _ = _split(rewards)
    num_samples = rewards.shape[1]
    is_other = has_reward[:, None, :] & ~torch.eye(num_samples, dtype=torch.bool, device=rewards.device)  # [B, G, G]
    spread = rewards.double()[:, None, :].expand(-1, num_samples, -1)
    is_varied = _largest(spread, is_other) > _smallest(spread, is_other)
    count = is_other.sum(dim=2)
    mean = torch.where(is_other, spread, 0.0).sum(dim=2, keepdim=True) / count.clamp(min=1)[:, :, None]
    squares = torch.where(is_other, spread - mean, 0.0).square().sum(dim=2)
    return torch.where(is_varied, (squares / (count - DIVISORS[divisor]).clamp(min=1)).sqrt() + eps, 1.0)


@torch.no_grad()
def group_mean_scale(rewards: torch.Tensor) -> torch.Tensor:
    """`[B, 1]`: the mean of each group; infinite, which leaves no advantage, where it is not above 0.

    For rewards 0 and 1 with the probability p of 1, the expected gradient of rewards over their mean is that of log p =
    -sum_k (1 - p)^k / k up to k = G; with the mean as the baseline, up to k = G - 1.

    Source: Tajwar et al., "Maximum Likelihood Reinforcement Learning", arXiv 2602.02710, theorem 2.
    """
    mean = group_mean(rewards)
    return torch.where(mean > 0, mean, float("inf"))


@torch.no_grad()
def batch_std(rewards: torch.Tensor, eps: float, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The standard deviation of all rewards of all processes (divisor n - 1) plus `eps`, 0-dimensional.

    Collective over `group` unless that is None. Source: TRL, `grpo_trainer.py`, scale_rewards="batch", eps 1e-4.
    """
    return deviation(moments(rewards, ~rewards.isnan(), group)) + eps


@torch.no_grad()
def scaled_difference(rewards: torch.Tensor, baseline: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`[B, G]`, (rewards - baseline) / scale in the dtype of the rewards; 0 for samples without a reward."""
    difference = (rewards.double() - baseline) / scale
    return torch.where(rewards.isnan(), 0.0, difference).to(rewards.dtype)


@torch.no_grad()
def decoupled_rewards(
    rewards: torch.Tensor,
    weights: torch.Tensor,
    normalise: Callable[[torch.Tensor], torch.Tensor],
    eps: float,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """`[B, G]`: several rewards as one, to which each contributes by its weight, whatever its scale.

        R = sum_k weight_k * normalise(r_k),  then (R - mean R) / (std R + eps), the statistics being those of the batch

    Args:
        rewards: `[B, G, K]`; nan where reward k does not judge the sample, to which it then contributes 0.
        weights: `[K]`.
        normalise: of one reward, `[B, G]`: its difference from the group's baseline over the group's scale, 0 for nan.
        eps: added to the deviation (divisor n - 1) of the batch.
        group: collective over these processes; None for one process.

    Returns:
        float64, 0 for a sample that no reward judges.

    Source: NVIDIA, "GDPO: Group reward-Decoupled Normalization Policy Optimization", arXiv 2601.05242; TRL,
    `grpo_trainer.py`, multi_objective_aggregation="normalize_then_sum" (eps 1e-4).
    """
    assert rewards.ndim == 3 and weights.shape == rewards.shape[2:], f"{rewards.shape=} {weights.shape=}"
    parts = torch.stack([normalise(reward) for reward in rewards.double().unbind(dim=2)], dim=2)
    is_judged = ~rewards.isnan().all(dim=2)
    total = (parts * weights.double()).sum(dim=2)
    found = moments(total, is_judged, group)
    return torch.where(is_judged, (total - found.mean) / (deviation(found) + eps), 0.0)


@torch.no_grad()
def normalised_steps(step_rewards: torch.Tensor, group_size: int, divisor: str | None, eps: float) -> torch.Tensor:
    """The reward of each step minus the mean over all steps of its group, divided by their deviation.

    Args:
        step_rewards: `[N, T]`, on the token that ends each step; nan on all others.
        group_size: G; rows i * G to (i + 1) * G are samples of one prompt, and G divides N.
        divisor, eps: as in `group_std`; divisor None does not scale.

    Returns:
        `[N, T]`, 0 where no step ends. The advantage of a token is its sum from that token on (`returns_to_go`).

    Source: Shao et al., "DeepSeekMath", arXiv 2402.03300, section 4.1.3 (process supervision).
    """
    assert len(step_rewards) % group_size == 0, f"{step_rewards.shape=} {group_size=}"
    grouped = step_rewards.reshape(len(step_rewards) // group_size, -1)  # [B, G * T]
    scale = grouped.new_ones(()) if divisor is None else group_std(grouped, divisor, eps)
    return scaled_difference(grouped, group_mean(grouped), scale).view_as(step_rewards)


@torch.no_grad()
def has_variance(rewards: torch.Tensor) -> torch.Tensor:
    """`[B]` bool: True for groups with two different rewards; all others teach nothing under a group baseline.

    Source: Yu et al., "DAPO", arXiv 2503.14476, section 3.2 (dynamic sampling).
    """
    has_reward = ~rewards.isnan()
    return _largest(rewards, has_reward) > _smallest(rewards, has_reward)


def _split(rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask of the samples with a reward, and the rewards in float64 with 0 elsewhere."""
    assert rewards.ndim == 2, f"{rewards.shape=}"
    has_reward = ~rewards.isnan()
    return has_reward, torch.where(has_reward, rewards, 0.0).double()


def _sum_of_others(rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each sample the sum of the other rewards of its group, and their number."""
    has_reward, exact = _split(rewards)
    num_others = has_reward.sum(dim=1, keepdim=True) - has_reward.long()
    return exact.sum(dim=1, keepdim=True) - exact, num_others


def _within_group(mean: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """`mean` between the smallest and the largest reward of its group, where rounding may not have left it."""
    has_reward = ~rewards.isnan()
    low = _smallest(rewards, has_reward)[:, None].double()
    high = _largest(rewards, has_reward)[:, None].double()
    return torch.where(high >= low, mean.clamp(low, high), mean)


def _smallest(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values, float("inf")).amin(dim=-1)


def _largest(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values, -float("inf")).amax(dim=-1)
