"""KV blocks: which are free, how many owners each has, and how sequences start on them. Plain Python."""

from bisect import insort
from collections import Counter
from dataclasses import dataclass

from hybrid_engine.generation.request.core import Admission, Copy, Prefill, Prompt, Sequence


class BlockPool:
    """Reference-counted blocks `0 .. num_blocks - 1`.

    Rows take the lowest free blocks and prompts the highest. So if a row needs a single block, the rows' blocks tend to
    be 0, 1, 2, ...: the contiguous cache, which attention reads without a gather.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))
        self.num_owners = [0] * num_blocks

    def allocate(self, count: int, highest: bool = False) -> list[int]:
        """Takes `count` free blocks; the caller has checked that there are enough."""
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
        """Takes one specific free block."""
        self.free.remove(block)
        self.num_owners[block] = 1

    def share(self, blocks: list[int]) -> list[int]:
        """Adds an owner to each block and returns the blocks in a new list."""
        for block in blocks:
            self.num_owners[block] += 1
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        """Removes an owner from each block and empties the list; a block without owners is free."""
        for block in blocks:
            self.num_owners[block] -= 1
            if self.num_owners[block] == 0:
                insort(self.free, block)
        blocks.clear()


@dataclass
class Begun:
    """The first sequence in line if some of its tokens have been fed; it has blocks for all of them."""

    sequence: Sequence
    blocks: list[int]
    num_fed: int


class KeptBlocks:
    """Blocks of `pool` whose owners do not run: prefilled prompts, finished sequences and a sequence fed in part."""

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self.prompts: list[Prompt] = []  # prefilled prompts whose samples still wait
        self.sequences: dict[Sequence, None] = {}  # finished sequences with their blocks, oldest first
        self.begun: Begun | None = None

    @property
    def num_of_sequences(self) -> int:
        """Number of blocks that finished sequences keep."""
        return sum(len(kept.blocks) for kept in self.sequences)

    @property
    def num_given_up_on_demand(self) -> int:
        """Number of blocks that only finished sequences own. Another thread may call this and get an outdated count."""
        times = Counter(block for kept in list(self.sequences) for block in list(kept.blocks))
        return sum(self.pool.num_owners[block] == count for block, count in times.items())

    def has_begun(self, sequence: Sequence) -> bool:
        """Whether some but not all of a sequence's tokens have been fed."""
        return self.begun is not None and self.begun.sequence is sequence

    def beginning_of(self, sequence: Sequence, is_alone: bool) -> tuple[list[int], int]:
        """Returns blocks that hold a prefix of a waiting sequence and the prefix's number of tokens, often none and 0.

        `is_alone`: whether the sequence is prefilled for itself. The blocks still belong to their owner.
        """
        if self.begun is not None and self.begun.sequence is sequence:
            return self.begun.blocks, self.begun.num_fed
        finished = sequence.begins_from
        if finished in self.sequences and is_alone and not sequence.tokens:
            return finished.blocks, finished.num_fed
        return [], 0

    def take_beginning(self, sequence: Sequence, is_alone: bool) -> tuple[list[int], int]:
        """`beginning_of`, but the blocks belong to the caller from now on."""
        blocks, num_fed = self.beginning_of(sequence, is_alone)
        if self.has_begun(sequence):
            self.begun = None
        elif num_fed:
            assert sequence.begins_from is not None
            del self.sequences[sequence.begins_from]
            sequence.begins_from.blocks = []
        return blocks, num_fed

    def give_up_sequence(self, wanted: Sequence | None = None) -> bool:
        """Frees the blocks of the oldest finished sequence, `wanted` last; returns False if there is none."""
        if not self.sequences:
            return False
        oldest = min(self.sequences, key=lambda kept: kept is wanted)
        del self.sequences[oldest]
        self.pool.release(oldest.blocks)
        return True

    def give_up_begun(self) -> bool:
        """Frees the blocks of the sequence fed in part, which starts over; returns False if there is none."""
        if self.begun is None:
            return False
        self.pool.release(self.begun.blocks)
        self.begun = None
        return True

    def give_up_prompt(self, prompt: Prompt) -> None:
        """Frees a prompt's blocks. They are not allocated before this turn's prefills and copies have run."""
        self.prompts.remove(prompt)
        self.pool.release(prompt.blocks)

    def give_up_one(self) -> bool:
        """Frees the kept blocks that are cheapest to lose; returns False if nothing is kept."""
        if self.give_up_sequence() or self.give_up_begun():
            return True
        if not self.prompts:
            return False
        self.give_up_prompt(self.prompts[-1])
        return True


class Starts:
    """Starts sequences on blocks of `block_size` tokens, from their first token or from a prefix that `kept` holds."""

    def __init__(self, kept: KeptBlocks, block_size: int) -> None:
        self._kept, self._pool, self._block_size = kept, kept.pool, block_size

    def num_to_prefill(self, sequence: Sequence) -> int:
        """Number of tokens that are fed before a waiting sequence draws: 0 if its prompt's blocks exist."""
        if sequence.prompt.blocks and not sequence.tokens:
            return 0
        return len(sequence) - self._kept.beginning_of(sequence, _is_alone(sequence))[1]

    def num_blocks(self, sequence: Sequence, is_kept: bool) -> int:
        """Number of blocks that a waiting sequence takes at its start; with `is_kept` its prompt has some already."""
        is_alone = _is_alone(sequence)
        there = len(self._kept.beginning_of(sequence, is_alone)[0])
        if is_alone:
            return max(0, self._num_blocks_for(len(sequence)) - there)
        prompt_length = len(sequence.prompt.tokens)
        kept = 0 if is_kept else self._num_blocks_for(prompt_length) - there
        return kept + (1 if prompt_length % self._block_size else 0)

    def make_room(self, sequence: Sequence, others_run: bool) -> bool:
        """Whether there are blocks to start a sequence; frees blocks of finished sequences if it needs them."""
        can_grow = self._num_blocks_for(sequence.most_fed) > self._num_blocks_for(len(sequence))
        spare = 1 if others_run and can_grow else 0  # without it the new sequence would be the next one preempted
        while self.num_blocks(sequence, bool(sequence.prompt.blocks)) + spare > len(self._pool.free):
            if not self._kept.give_up_sequence(wanted=sequence.begins_from):
                return False
        return True

    def start(self, sequence: Sequence, admission: Admission) -> None:
        """Gives a sequence its blocks, and adds its prefill and copies to `admission`."""
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
        """Feeds the next `num_tokens` of a sequence that keeps waiting, with blocks for all its tokens."""
        blocks, first = self._take_blocks(sequence)
        last = first + num_tokens
        self._kept.begun = Begun(sequence, blocks, last)
        admission.prefills.append(_prefill_of(sequence, blocks, first, last))

    def _take_blocks(self, sequence: Sequence) -> tuple[list[int], int]:
        """Returns the blocks to prefill a waiting sequence into, and the number of tokens that they already hold."""
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
    """Whether a sequence is prefilled for itself: a preempted one, or the last sample of its prompt."""
    prompt = sequence.prompt
    return bool(sequence.tokens) or (not prompt.blocks and prompt.num_waiting == 1)


def _prefill_of(owner: Prompt | Sequence, blocks: list[int], first: int, last: int | None = None) -> Prefill:
    tokens = owner.tokens if isinstance(owner, Prompt) else owner.prompt.tokens + owner.tokens
    return Prefill(owner, tokens, list(blocks), first, len(tokens) if last is None else last)
