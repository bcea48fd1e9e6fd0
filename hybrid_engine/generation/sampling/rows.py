"""Rows of one turn that are drawn each by its own options, all at once.

What the options say is put into tensors when the rows change, and serves until they do again. S rows, V vocabulary.
"""

from typing import NamedTuple

import torch

from hybrid_engine.generation.batching.sequence import Sequence
from hybrid_engine.ops.sample_rows import adjust_rows, build_row_options, draw_rows, scaled_logprobs


class DrawnRows(NamedTuple):
    """What was drawn for S rows, on their device."""

    tokens: torch.Tensor
    """`[S]` int64."""
    logprobs: torch.Tensor
    """`[S]` fp32, under softmax(logits / temperature), unfiltered."""
    ends: torch.Tensor
    """`[S]` bool: whether the token ends its sequence."""


class MixedRows:
    """Draws for `sequences`, in their order, from logits over `vocab` tokens on `device`."""

    def __init__(self, sequences: list[Sequence], vocab: int, device: torch.device):
        self.options = build_row_options([sequence.options.sampling for sequence in sequences], vocab, device)

    def draw(
        self, logits: torch.Tensor, keys: torch.Tensor, draws: torch.Tensor, seen: torch.Tensor | None
    ) -> DrawnRows:
        """One token for each row of `logits [S, V]` fp32, which stay as they are.

        Args:
            keys, draws: `[S]` int64, name the noise; `draws` counts the row's tokens drawn so far.
            seen: `[S, V]` bool, tokens of prompt and response; unused without a repetition penalty.
        """
        adjusted = adjust_rows(logits, self.options, draws, seen)
        tokens = draw_rows(adjusted, self.options, keys, draws)
        ends = (tokens[:, None] == self.options.ends).any(1)
        return DrawnRows(tokens, scaled_logprobs(logits, tokens, self.options), ends)
