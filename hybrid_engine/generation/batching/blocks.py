"""Which KV blocks are free and how many owners each has. Plain Python; knows nothing of tensors."""

from bisect import insort
from collections import Counter
from dataclasses import dataclass

from hybrid_engine.generation.request.core import Admission, Copy, Prefill, Prompt, Sequence


class BlockPool:
    """Reference-counted blocks `0 .. num_blocks - 1`.

    Rows take the lowest free blocks and prompts the highest, so that where a row needs one block only the
    rows' blocks tend to be 0, 1, 2, ...: the contiguous cache, which attention reads without a gather.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))
        self.num_owners = [0] * num_blocks

    def allocate(self, count: int, highest: bool = False) -> list[int]:
        """Takes `count` free blocks; the caller has seen to it that there are as many."""
        assert count <= len(self.free), f"{count=} {len(self.free)=}"
        if highest:
            taken = self.free[len(self.free) - count :]
            del self.free[len(self.free) - count :]
        else:
            taken = self.free[:count]
            del self.free[:count]
        for block in taken:
            self.num_owners[block] = 1
        return taken

    def take(self, block: int) -> None:
        """Takes one given free block."""
        self.free.remove(block)
        self.num_owners[block] = 1

    def share(self, blocks: list[int]) -> list[int]:
        """Adds an owner to each block and returns them."""
        for block in blocks:
            self.num_owners[block] += 1
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        """Takes an owner from each block and empties the list; a block without owners is free."""
        for block in blocks:
            self.num_owners[block] -= 1
            if self.num_owners[block] == 0:
                insort(self.free, block)
        blocks.clear()


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


class Starts:
    """Starts sequences on blocks of `block_size` tokens, from their beginning or from what `kept` has of it."""

    def __init__(self, kept: KeptBlocks, block_size: int) -> None:
        self._kept, self._pool, self._block_size = kept, kept.pool, block_size

    def num_to_prefill(self, sequence: Sequence) -> int:
        """Tokens that are fed before a waiting sequence draws: 0 where its prompt's blocks are there."""
        if sequence.prompt.blocks and not sequence.tokens:
            return 0
        return len(sequence) - self._kept.beginning_of(sequence, _is_alone(sequence))[1]

    def num_blocks(self, sequence: Sequence, is_kept: bool) -> int:
        """Blocks that a waiting sequence takes when it starts; with `is_kept` its prompt has some already."""
        is_alone = _is_alone(sequence)
        there = len(self._kept.beginning_of(sequence, is_alone)[0])
        if is_alone:
            return max(0, self._num_blocks_for(len(sequence)) - there)
        prompt_length = len(sequence.prompt.tokens)
        kept = 0 if is_kept else self._num_blocks_for(prompt_length) - there
        return kept + (1 if prompt_length % self._block_size else 0)

    def make_room(self, sequence: Sequence, others_run: bool) -> bool:
        """Whether there are blocks to start it; finished sequences give up those that they keep where it needs them."""
        can_grow = self._num_blocks_for(sequence.most_fed) > self._num_blocks_for(len(sequence))
        spare = 1 if others_run and can_grow else 0  # without it a newcomer would be the next to be preempted
        while self.num_blocks(sequence, bool(sequence.prompt.blocks)) + spare > len(self._pool.free):
            if not self._kept.give_up_sequence(wanted=sequence.begins_from):
                return False
        return True

    def start(self, sequence: Sequence, admission: Admission) -> None:
        """Gives a sequence its blocks, and `admission` what has to be prefilled and copied into them."""
        prompt = sequence.prompt
        if _is_alone(sequence):
            sequence.blocks, first = self._take_blocks(sequence)
            admission.prefills.append(_prefill_of(sequence, sequence.blocks, first))
        else:
            if not prompt.blocks:
                prompt.blocks, first = self._take_blocks(sequence)
                self._kept.prompts.append(prompt)
                admission.prefills.append(_prefill_of(prompt, prompt.blocks, first))
            self._fork(sequence, admission)
        prompt.num_waiting -= 0 if sequence.tokens else 1
        admission.sequences.append(sequence)

    def feed_chunk(self, sequence: Sequence, num_tokens: int, admission: Admission) -> None:
        """Feeds the next `num_tokens` of a sequence that goes on waiting, with blocks for all of them."""
        blocks, first = self._take_blocks(sequence)
        last = first + num_tokens
        self._kept.begun = Begun(sequence, blocks, last)
        admission.prefills.append(_prefill_of(sequence, blocks, first, last))

    def _take_blocks(self, sequence: Sequence) -> tuple[list[int], int]:
        """Blocks for what a waiting sequence is prefilled with, and of how many tokens they hold keys already."""
        is_alone = _is_alone(sequence)
        blocks, num_fed = self._kept.take_beginning(sequence, is_alone)
        missing = max(0, self._num_blocks_for(len(sequence)) - len(blocks))
        return blocks + self._pool.allocate(missing, highest=not is_alone), num_fed

    def _fork(self, sequence: Sequence, admission: Admission) -> None:
        """Shares the prompt's full blocks and copies the last partial one."""
        prompt = sequence.prompt
        num_full, num_rest = divmod(len(prompt.tokens), self._block_size)
        sequence.blocks = self._pool.share(prompt.blocks[:num_full])
        if num_rest:
            sequence.blocks += self._pool.allocate(1)
            admission.copies.append(Copy(prompt.blocks[num_full], sequence.blocks[num_full], num_rest))

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _is_alone(sequence: Sequence) -> bool:
    """True for a sequence that is prefilled for itself: a preempted one, or the last sample of its prompt."""
    prompt = sequence.prompt
    return bool(sequence.tokens) or (not prompt.blocks and prompt.num_waiting == 1)


def _prefill_of(owner: Prompt | Sequence, blocks: list[int], first: int, last: int | None = None) -> Prefill:
    tokens = owner.tokens if isinstance(owner, Prompt) else owner.prompt.tokens + owner.tokens
    return Prefill(owner, tokens, list(blocks), first, len(tokens) if last is None else last)
