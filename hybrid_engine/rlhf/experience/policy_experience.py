"""What an update of a policy without a critic learns from.

N: answers of this process, T: response columns.
"""

from typing import Any, NamedTuple

import torch

from hybrid_engine.containers.streams import send_to_device
from hybrid_engine.distributed.processes import gather_objects
from hybrid_engine.rlhf.algorithms.choices import Algorithm
from hybrid_engine.rlhf.algorithms.objective import PolicyBatch
from hybrid_engine.rlhf.data.sequences import Sequences, response_logprobs, response_logprobs_and_entropy


class Experience(NamedTuple):
    """A rollout with everything that an update needs."""

    sequences: Sequences
    logprobs: torch.Tensor
    """`[N, T]` fp32, the sampler's own"""
    batch: PolicyBatch
    """`[N, T]` each; its `logprobs` are the old ones until an update computes them anew"""

    def rows(self, index: torch.Tensor) -> "Experience":
        """The rows `index`, a tensor of the host, without the columns that are padding in all of them."""
        sequences = self.sequences.rows(index)
        columns, places = sequences.response_mask.shape[1], send_to_device(index, self.logprobs.device)
        parts = (None if value is None else value[places, :columns] for value in self.batch)
        return Experience(sequences, self.logprobs[places, :columns], PolicyBatch(*parts))


def has_gradient(algorithm: Algorithm, batch: PolicyBatch) -> torch.Tensor:
    """`[N]` bool: whether the loss of a row depends on the policy by construction.

    A row whose advantages are all 0, as in a group whose answers have one reward, has no gradient unless a KL or an
    entropy in the loss gives it one; nor has one whose tokens are all masked.
    """
    if algorithm.kl_place == "loss" or algorithm.entropy_coef:
        return batch.mask.any(dim=1)
    advantages = batch.advantages if batch.weights is None else batch.advantages * batch.weights
    return (batch.mask & (advantages != 0)).any(dim=1)


def trained_rows(with_gradient: torch.Tensor) -> torch.Tensor:
    """Indices of the rows that go through the model in a step, in order; as many on every process. Collective.

    Args:
        with_gradient: `[N]` bool, of this process's rows, of which each process has N.

    Returns:
        The rows with a gradient, and on a process with fewer of them than another some of the others.
    """
    number = max(gather_objects(int(with_gradient.sum())))
    order = torch.argsort(~with_gradient, stable=True)  # those with a gradient first
    return order[:number].sort().values


def present_batch(actor: Any, experience: Experience, algorithm: Algorithm, temperature: float) -> PolicyBatch:
    """The batch with what the actor says now, with its gradient: log-probabilities and, for a bonus on it, entropy."""
    if algorithm.entropy_coef:
        logprobs, entropy = response_logprobs_and_entropy(actor, experience.sequences, temperature)
        return experience.batch._replace(logprobs=logprobs, entropy=entropy)
    return experience.batch._replace(logprobs=response_logprobs(actor, experience.sequences, temperature))
