"""Blocks and state slots of a rollout: who owns them, and what those without a running owner still hold.

`BlockPool` counts the owners of each block, `PrefixCache` finds blocks by the tokens in them, and `KeptBlocks` has the
owners that do not run. The scheduler and its `Starts` take blocks from them.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from hybrid_engine.generation.core import Prefill, Prompt, Sequence, block_keys


class BlockPool:
    """Reference-counted blocks `0 .. num_blocks - 1`.

    Rows take the lowest free blocks and prompts the highest. So if a row needs a single block, the rows' blocks tend to
    be 0, 1, 2, ...: the contiguous cache, which attention reads without a gather.

    A block that has a key keeps its contents when its last owner releases it: it is idle, can be shared again, and is
    reused only when no block is free, the one that was released first before the others.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))
        self.idle: dict[int, None] = {}  # blocks with a key and without owners, in the order of their release
        self.num_owners = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated: free and idle ones."""
        return len(self.free) + len(self.idle)

    def allocate(self, count: int, highest: bool = False) -> list[int]:
        """Takes `count` free blocks, reusing idle ones if needed; the caller has checked that there are enough."""
        assert count <= self.num_free, f"{count=} {self.num_free=}"
        self.reuse_idle(count - len(self.free))
        if highest:
            taken = self.free[len(self.free) - count :]
            del self.free[len(self.free) - count :]
        else:
            taken = self.free[:count]
            del self.free[:count]
        for block in taken:
            self.num_owners[block] = 1
        return taken

    def reuse_idle(self, count: int) -> None:
        """Frees the `count` blocks that have been idle for longest, or all idle blocks if they are fewer."""
        for block in list(islice(self.idle, max(0, count))):
            del self.idle[block], self._block_of[self._key_of.pop(block)]
            insort(self.free, block)

    def take(self, block: int) -> None:
        """Takes one specific free block."""
        self.free.remove(block)
        self.num_owners[block] = 1

    def share(self, blocks: list[int]) -> list[int]:
        """Adds an owner to each block and returns the blocks in a new list."""
        for block in blocks:
            self.idle.pop(block, None)
            self.num_owners[block] += 1
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        """Removes an owner from each block and empties the list; a block without owners is free or idle."""
        for block in reversed(blocks):  # a prefix is found from its first block on, which is reused last
            self.num_owners[block] -= 1
            if self.num_owners[block]:
                continue
            if block in self._key_of:
                self.idle[block] = None
            else:
                insort(self.free, block)
        blocks.clear()

    def note(self, keys: Iterable[bytes], blocks: list[int]) -> None:
        """Gives each of `blocks` its key, as far as there are keys; a key that another block has stays there."""
        for key, block in zip(keys, blocks, strict=False):
            if key not in self._block_of:
                self._block_of[key], self._key_of[block] = block, key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the blocks that have the first of `keys`, up to one that no block has."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks


class PrefixCache:
    """Finds blocks of `pool` that hold the first tokens of a prompt, because an earlier prompt began alike.

    A block of `block_size` tokens is found by a digest of its tokens, all before them and the prompt's salt. It holds
    prefilled tokens of a prompt alone: a decoded token is rounded in another way. The cache lives as long as its
    scheduler, and so has keys and values of one adapter and one version of the weights.

    Args:
        is_on: False finds nothing.
    """

    def __init__(self, pool: BlockPool, block_size: int, is_on: bool):
        self._pool, self._block_size, self.is_on = pool, block_size, is_on

    def find(self, sequence: Sequence) -> "Beginning":
        """Returns the longest prefix of a waiting sequence that is in blocks; at least one token is left to feed."""
        if not self.is_on:
            return Beginning([], 0)
        keys = self._keys(sequence.prompt)[: (len(sequence) - 1) // self._block_size]
        blocks = self._pool.find(keys)
        return Beginning(blocks, len(blocks) * self._block_size)

    def note(self, prefill: Prefill) -> None:
        """Makes the full blocks of a prompt that `prefill` completes available, also to prefills of the same pass.

        Each layer writes the keys and values of all tokens of a pass before it reads any.
        """
        if self.is_on:
            num_full = min(prefill.last, len(prefill.prompt.tokens)) // self._block_size
            self._pool.note(self._keys(prefill.prompt)[:num_full], prefill.blocks)

    def _keys(self, prompt: Prompt) -> list[bytes]:
        if prompt.block_keys is None:
            prompt.block_keys = block_keys(prompt.tokens, self._block_size, prompt.salt)
        return prompt.block_keys


@dataclass
class Begun:
    """The first sequence in line if some of its tokens have been fed; it has blocks for all of them."""

    sequence: Sequence
    blocks: list[int]
    num_fed: int
    state_slot: int = -1
    is_decoded: bool = False
    """See `Beginning`."""


class StateSlots:
    """Slots `0 .. num_slots - 1` for the states of sequences; with none, layers have no states and owners no slot."""

    def __init__(self, num_slots: int):
        self.num_slots, self.free = num_slots, list(range(num_slots))

    def has_free(self, count: int) -> bool:
        """Whether `count` slots can be allocated."""
        return not self.num_slots or count <= len(self.free)

    def allocate(self) -> int:
        """Takes a free slot; -1 if layers have no states."""
        return self.free.pop(0) if self.num_slots else -1

    def release(self, owner: Prompt | Sequence | Begun) -> None:
        """Frees the slot of `owner`, if it has one."""
        if owner.state_slot >= 0:
            insort(self.free, owner.state_slot)
        owner.state_slot = -1


class Beginning(NamedTuple):
    """The prefix of a waiting sequence that was fed before."""

    blocks: list[int]
    num_fed: int
    """Number of its tokens."""
    state_slot: int = -1
    is_decoded: bool = False
    """Whether tokens of an earlier answer are among them, which were decoded."""


class KeptBlocks:
    """Blocks of `pool`, and slots of `states`, of owners that do not run.

    These are prefilled prompts, finished sequences and a sequence fed in part. `prefixes` finds blocks of any owner.
    """

    def __init__(self, pool: BlockPool, states: StateSlots, prefixes: PrefixCache):
        self.pool, self.states, self.prefixes = pool, states, prefixes
        self.num_prompt_tokens = self.num_reused_tokens = 0
        """Tokens of all prompts that were prefilled, and those of them whose keys and values were there already."""
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

    def beginning_of(self, sequence: Sequence, is_alone: bool) -> Beginning:
        """Returns the prefix of a waiting sequence whose blocks and state exist, often an empty one.

        `is_alone`: whether the sequence is prefilled for itself. Blocks and slot still belong to their owner.
        """
        if self.begun is not None and self.begun.sequence is sequence:
            return Beginning(self.begun.blocks, self.begun.num_fed, self.begun.state_slot, self.begun.is_decoded)
        finished = sequence.begins_from
        if finished in self.sequences and is_alone and not sequence.tokens:
            num_fed = finished.num_fed + (finished.num_late if self.states.num_slots else 0)
            if num_fed < len(sequence):
                return Beginning(finished.blocks, num_fed, finished.state_slot, is_decoded=True)
        return self.prefixes.find(sequence)

    def take_beginning(self, sequence: Sequence, is_alone: bool) -> Beginning:
        """`beginning_of`, but blocks and slot belong to the caller from now on."""
        beginning = self.beginning_of(sequence, is_alone)
        if self.has_begun(sequence):
            self.begun = None
            return beginning
        if not sequence.tokens:
            sequence.prompt.num_reused = beginning.num_fed
            self.num_prompt_tokens += len(sequence.prompt.tokens)
            self.num_reused_tokens += beginning.num_fed
        if not beginning.is_decoded:
            return beginning._replace(blocks=self.pool.share(beginning.blocks))
        assert sequence.begins_from is not None
        del self.sequences[sequence.begins_from]
        sequence.begins_from.blocks, sequence.begins_from.state_slot = [], -1
        return beginning

    def give_up_sequence(self, wanted: Sequence | None = None) -> bool:
        """Frees the blocks of the oldest finished sequence, `wanted` last; returns False if there is none."""
        if not self.sequences:
            return False
        oldest = min(self.sequences, key=lambda kept: kept is wanted)
        del self.sequences[oldest]
        self.pool.release(oldest.blocks)
        self.states.release(oldest)
        return True

    def give_up_begun(self) -> bool:
        """Frees the blocks of the sequence fed in part, which starts over; returns False if there is none."""
        if self.begun is None:
            return False
        self.pool.release(self.begun.blocks)
        self.states.release(self.begun)
        self.begun = None
        return True

    def give_up_prompt(self, prompt: Prompt) -> None:
        """Frees a prompt's blocks. They are not allocated before this turn's prefills and copies have run."""
        self.prompts.remove(prompt)
        self.pool.release(prompt.blocks)
        self.states.release(prompt)

    def give_up_one(self) -> bool:
        """Frees the kept blocks that are cheapest to lose; returns False if nothing is kept."""
        if self.give_up_sequence() or self.give_up_begun():
            return True
        if not self.prompts:
            return False
        self.give_up_prompt(self.prompts[-1])
        return True
