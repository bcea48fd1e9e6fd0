"""What an update of a policy without a critic learns from.

N: answers of this process, T: response columns.
"""

from typing import NamedTuple

import torch

from hybrid_engine.recipes.algorithms.objective import PolicyBatch
from hybrid_engine.recipes.data.sequences import Sequences


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
