"""A decode step whose tokens somebody else chooses, on the host and between two passes.

Nothing is recorded and nothing is under way while the choice is made: it may be any Python. S rows, V vocabulary.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.containers.streams import send_to_device
from hybrid_engine.generation.batching.sequence import PENDING, Sequence
from hybrid_engine.generation.decoding.decode import Draw, Drawn
from hybrid_engine.ops import Batch, DecodeBatch


class TurnModel(Protocol):
    """What the turns of a rollout need of a model."""

    @property
    def vocab_size(self) -> int:
        """Tokens that there are logits of."""

    @property
    def recompute_length(self) -> int | None:
        """See `InferenceModel.recompute_length`."""

    def forward(self, batch: Batch, kv: torch.Tensor, layers: Iterable[InferenceLayer]) -> torch.Tensor:
        """The logits of `batch`, as `InferenceModel.forward` gives them."""


Choice = Callable[[list[Sequence], torch.Tensor], Drawn]
"""`(rows, logits [S, V] fp32) -> Drawn`: the next token of each row and which rows it ends. Where processes share the
model, called on each of them with the same logits, and must return the same."""


class OpenStep:
    """Stands in the place of a DecodeStep, for rollouts without forks (one sample of each prompt) and without lag."""

    graphs = None

    def __init__(self, model: TurnModel, kv: torch.Tensor, choice: Choice):
        self.model, self.kv, self.choice = model, kv, choice

    def run(
        self, sequences: list[Sequence], changed: list[Sequence], layers: Callable[[], Iterable[InferenceLayer]]
    ) -> Draw:
        """Feeds each sequence's newest token and draws the next; `changed` is not needed."""
        newest = [sequence.tokens[-1] for sequence in sequences]
        assert PENDING not in newest, "a token must be known before it is fed"
        context, size = max(map(len, sequences)), self.kv.shape[4]
        num_columns = -(-context // size)
        blocks = [(row.blocks + [row.blocks[0]] * num_columns)[:num_columns] for row in sequences]
        numbers = torch.tensor([newest, [len(row) - 1 for row in sequences]])
        tokens, positions = send_to_device(numbers, self.kv.device)
        in_place = num_columns == 1 and all(row.blocks[0] == place for place, row in enumerate(sequences))
        batch = DecodeBatch(
            tokens=tokens,
            positions=positions,
            block_tables=send_to_device(torch.tensor(blocks), self.kv.device),
            context=context,
            is_identity=in_place,
        )
        return self.draw(sequences, self.model.forward(batch, self.kv, layers()))

    def draw(self, sequences: list[Sequence], logits: torch.Tensor) -> Draw:
        """Draws the next token of sequences from `logits [S, V]` fp32."""
        drawn = self.choice(sequences, logits)
        return Draw(lambda: drawn)
