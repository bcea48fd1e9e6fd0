"""Blocks that nobody runs on, kept because somebody who waits may go on from them. Plain Python.

Whatever they hold can be computed again: they are given up where blocks are short.
"""

from collections import Counter
from dataclasses import dataclass

from hybrid_engine.generation.batching.blocks import BlockPool
from hybrid_engine.generation.batching.sequence import Prompt, Sequence


@dataclass
class Begun:
    """The first in line, of whose tokens some have been fed; it has blocks for all."""

    sequence: Sequence
    blocks: list[int]
    num_fed: int


class KeptBlocks:
    """Who keeps blocks of `pool` without running."""

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self.prompts: list[Prompt] = []  # prefilled, with samples still waiting
        self.sequences: dict[Sequence, None] = {}  # finished, with their blocks; the oldest first
        self.begun: Begun | None = None

    @property
    def num_of_sequences(self) -> int:
        """Blocks that finished sequences keep."""
        return sum(len(kept.blocks) for kept in self.sequences)

    @property
    def num_given_up_on_demand(self) -> int:
        """Blocks that finished sequences keep and nobody else has. May be asked by another thread, and be late then."""
        times = Counter(block for kept in list(self.sequences) for block in list(kept.blocks))
        return sum(self.pool.num_owners[block] == count for block, count in times.items())

    def has_begun(self, sequence: Sequence) -> bool:
        """Whether some of its tokens have been fed and the rest have not."""
        return self.begun is not None and self.begun.sequence is sequence

    def beginning_of(self, sequence: Sequence, is_alone: bool) -> tuple[list[int], int]:
        """Blocks that hold the beginning of a waiting sequence, and of how many tokens; none and 0 for most.

        `is_alone`: it is prefilled for itself. The blocks are still their owner's.
        """
        if self.begun is not None and self.begun.sequence is sequence:
            return self.begun.blocks, self.begun.num_fed
        finished = sequence.begins_from
        if finished in self.sequences and is_alone and not sequence.tokens:
            return finished.blocks, finished.num_fed
        return [], 0

    def take_beginning(self, sequence: Sequence, is_alone: bool) -> tuple[list[int], int]:
        """`beginning_of`, whose blocks are the caller's from now on."""
        blocks, num_fed = self.beginning_of(sequence, is_alone)
        if self.has_begun(sequence):
            self.begun = None
        elif num_fed:
            assert sequence.begins_from is not None
            del self.sequences[sequence.begins_from]
            sequence.begins_from.blocks = []
        return blocks, num_fed

    def give_up_sequence(self, wanted: Sequence | None = None) -> bool:
        """Frees the blocks of the oldest finished sequence, `wanted` last; False if there is none."""
        if not self.sequences:
            return False
        oldest = min(self.sequences, key=lambda kept: kept is wanted)
        del self.sequences[oldest]
        self.pool.release(oldest.blocks)
        return True

    def give_up_begun(self) -> bool:
        """Frees the blocks of the one that has begun, which begins anew; False if there is none."""
        if self.begun is None:
            return False
        self.pool.release(self.begun.blocks)
        self.begun = None
        return True

    def give_up_prompt(self, prompt: Prompt) -> None:
        """Frees a prompt's blocks. Nothing takes them before this turn's prefills and copies have run."""
        self.prompts.remove(prompt)
        self.pool.release(prompt.blocks)

    def give_up_one(self) -> bool:
        """Frees the blocks that are missed the least; False if nothing is kept."""
        if self.give_up_sequence() or self.give_up_begun():
            return True
        if not self.prompts:
            return False
        self.give_up_prompt(self.prompts[-1])
        return True
