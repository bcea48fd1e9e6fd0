"""What an update of an actor and its critic learns from, and the rewards of its tokens.

N: answers of this process, T: response columns.
"""

from dataclasses import dataclass

import torch

from hybrid_engine.containers.streams import send_to_device
from hybrid_engine.rl.advantages import token_rewards
from hybrid_engine.rlhf.data.sequences import Sequences, pad_numbers
from hybrid_engine.rlhf.rewards.scores import Scores


@dataclass(frozen=True, kw_only=True)
class CriticExperience:
    """A rollout with everything an update needs; all but `sequences` are `[N, T]` fp32."""

    sequences: Sequences
    logprobs: torch.Tensor
    """The sampler's own."""
    logprobs_old: torch.Tensor
    values_old: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor

    def rows(self, index: torch.Tensor) -> "CriticExperience":
        """The rows `index`, a tensor of the host, without the columns that are padding in all of them."""
        sequences = self.sequences.rows(index)
        columns, places = sequences.response_mask.shape[1], send_to_device(index, self.logprobs.device)
        return CriticExperience(
            sequences=sequences,
            logprobs=self.logprobs[places, :columns],
            logprobs_old=self.logprobs_old[places, :columns],
            values_old=self.values_old[places, :columns],
            advantages=self.advantages[places, :columns],
            returns=self.returns[places, :columns],
        )


def reward_tokens(scores: Scores, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """`[N, T]`: the KL penalty, and each score on the last token or, of a process reward, where its numbers stand."""
    if scores.per_token is None:
        return token_rewards(torch.tensor(scores.total, device=kl.device), kl, mask, kl_coef)
    penalties = token_rewards(torch.zeros(len(kl), device=kl.device), kl, mask, kl_coef)
    return penalties + pad_numbers(scores.per_token, mask.shape[1], kl.device)
