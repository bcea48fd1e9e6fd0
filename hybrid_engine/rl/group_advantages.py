"""Baselines and scales of the GRPO family, computed within groups of samples.

B: prompts of this process, G: samples of each prompt. Rewards are `[B, G]`; nan marks a sample that has none: it counts
in no statistic. An advantage is (reward - baseline) / scale, and 0 for a sample without a reward (`scaled_difference`).

Statistics are float64, so that the eps added to a deviation against division by zero stays smaller than it. In a group
of equal rewards every baseline is that reward to the bit, so that its advantages are 0 and not rounding.
"""

import torch
import torch.distributed as dist

from hybrid_engine.rl.advantages import deviation, moments


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


DIVISORS = {"n": 0, "n-1": 1}
"""The number subtracted from the number of samples to get the divisor of a sum of squares."""


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
