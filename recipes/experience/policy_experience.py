"""What an update of a policy without a critic learns from.

N: answers of this process, T: response columns.
"""

from typing import Any, NamedTuple

import torch

from hybrid_engine.recipes.algorithms.choices import Algorithm
from hybrid_engine.recipes.algorithms.objective import PolicyBatch
from hybrid_engine.recipes.data.sequences import Sequences, response_logprobs, response_logprobs_and_entropy


class Experience(NamedTuple):
    """A rollout with everything that an update needs."""

    sequences: Sequences
    logprobs: torch.Tensor
    """`[N, T]` fp32, the sampler's own"""
    batch: PolicyBatch
    """`[N, T]` each; its `logprobs` are the old ones until an update computes them anew"""

    def rows(self, index: torch.Tensor) -> "Experience":
        """The rows `index`, without the columns that are padding in all of them."""
        sequences = self.sequences.rows(index)
        columns = sequences.response_mask.shape[1]
        parts = (None if value is None else value[index, :columns] for value in self.batch)
        return Experience(sequences, self.logprobs[index, :columns], PolicyBatch(*parts))


def present_batch(actor: Any, experience: Experience, algorithm: Algorithm, temperature: float) -> PolicyBatch:
    """The batch with what the actor says now, with its gradient: log-probabilities and, for a bonus on it, entropy."""
    if algorithm.entropy_coef:
        logprobs, entropy = response_logprobs_and_entropy(actor, experience.sequences, temperature)
        return experience.batch._replace(logprobs=logprobs, entropy=entropy)
    return experience.batch._replace(logprobs=response_logprobs(actor, experience.sequences, temperature))
