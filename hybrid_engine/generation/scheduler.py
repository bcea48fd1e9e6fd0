"""The scheduler of continuous batching: plain Python over prompts, sequences and block numbers, without tensors.

At most `max_running` sequences decode at once; a finished one leaves at once, and the next waiting ones take its
place. A prompt is prefilled once; its samples share its full blocks and copy the last partial one. When blocks run
out, prompts kept for later samples are released first, then the newest running sequence is preempted: its blocks are
freed, and it is prefilled again later, response included. A prompt that begins like an earlier one shares the full
blocks of that beginning as long as nothing else needed them (`PrefixCache`). `BlockPool` counts the owners of each
block, and `KeptBlocks` has those that do not run. `Starts` decides which blocks a starting sequence takes, and
`WaitingLine` which sequence is first in line, fair between clients. If there are several shares, the newest sequence of
the largest share is preempted, also to make way for a share that has fewer rows than its part.

If layers keep states of fixed size, everything that owns blocks owns a state slot too: a running sequence, a prompt
that samples fork from, a prompt fed in part, and a finished sequence whose conversation may go on. A fork copies the
prompt's slot. A state cannot be cut: a finished sequence is continued from exactly where its state ends, or fed again.

A pass with a prefill is not a recorded step, and running sequences wait for it unless they can decode in the same pass
(see `grow_beside`), so prompts enter in bulk: see `_is_worth_a_pass`. Samples of a prompt that is prefilled already
enter at once. A prompt that would make others wait long is fed in chunks, one per turn, and the others decode in the
same passes: see `admit`.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from hybrid_engine.generation.core import (
    PENDING,
    Admission,
    Copy,
    Prefill,
    Prompt,
    RolloutPlan,
    Sequence,
    block_keys,
)

# Running sequences per sequence that a prefill must start. With 1 024 prompts over 256 slots and answers of 256 tokens
# on average there are 58 prefill turns instead of 511, and 1 777 decode turns instead of 1 746: 2.5% of the slots wait.
RUNNING_PER_NEWCOMER = 16
# Tokens of one prefill pass, which bounds its activations.
MAX_PREFILL_TOKENS = 8192
# Parts of a chunk that a turn feeds if several shares have sequences: one client's prompts must not take so long that
# the rows of others, which draw a token a turn, stand still. Rows alone are no measure: a request for the scores of a
# prompt holds its row for one turn.
PARTS_OF_CHUNK = 4


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


class Scheduler:
    """Schedules `sequences` in their order over `num_blocks` blocks of `block_size` tokens."""

    def __init__(
        self,
        sequences: Iterable[Sequence],
        *,
        max_running: int,
        num_blocks: int,
        block_size: int,
        max_prefill_tokens: int,
        longest: int | None = None,
        num_state_slots: int = 0,
        caches_prefixes: bool = False,
    ):
        """Queues `sequences`.

        `num_state_slots`: slots of states, 0 for a model without states.
        `caches_prefixes`: whether prompts share the full blocks of equal beginnings; never with states, which cannot be
        cut, and never if each sequence fits one block.
        `longest`: number of tokens that are fed of the longest sequence ever added; None: of the longest of
        `sequences`.
        """
        sequences = list(sequences)
        if longest is None:
            longest = max((sequence.most_fed for sequence in sequences), default=0)
        self.is_contiguous = longest <= block_size  # every sequence fits one block
        self.pool = BlockPool(num_blocks)
        self.states = StateSlots(num_state_slots)
        caches_prefixes = caches_prefixes and not self.is_contiguous and not num_state_slots
        self.kept = KeptBlocks(self.pool, self.states, PrefixCache(self.pool, block_size, caches_prefixes))
        self.waiting = WaitingLine(self.kept)
        for sequence in sequences:
            self.add(sequence)
        self.running: list[Sequence] = []  # oldest first
        self._starts = Starts(self.kept, block_size)
        self.max_running, self.block_size, self.max_prefill_tokens = max_running, block_size, max_prefill_tokens
        self.free_slots = list(range(max_running))
        self.changed: list[Sequence] = []  # started, or blocks changed, since `take_changed`
        self.num_preemptions = 0

    @classmethod
    def for_plan(cls, plan: RolloutPlan) -> "Scheduler":
        """Builds the scheduler of a rollout in its initial state."""
        return cls(
            plan.sequences,
            max_running=plan.max_running,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            max_prefill_tokens=plan.max_prefill_tokens or MAX_PREFILL_TOKENS,
            longest=plan.longest,
            num_state_slots=plan.num_state_slots,
            caches_prefixes=plan.caches_prefixes and not plan.records_routing,
        )

    def add(self, sequence: Sequence) -> None:
        """Appends a sequence to its share's line; one that has tokens already continues from them."""
        sequence.prompt.num_waiting += 0 if sequence.tokens else 1
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Removes a waiting or running sequence, which then counts as finished."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            if self.kept.has_begun(sequence):
                self.kept.give_up_begun()
            sequence.prompt.num_waiting -= 0 if sequence.tokens else 1
        self.finish(sequence, "cancelled")

    @property
    def has_work(self) -> bool:
        """True until every sequence has finished."""
        return bool(self.waiting or self.running)

    def admit(self, chunk_tokens: int | None = None) -> Admission:
        """Moves waiting sequences to running while slots, blocks and the prefill budget last.

        With `chunk_tokens`, a longer prompt is fed that many tokens per turn while others run, and its sequence enters
        with the last chunk. If several shares have sequences, a turn feeds a part of a chunk in all.
        """
        self.waiting.count_turn()
        admission, budget = Admission(), self.max_prefill_tokens
        most_fed = chunk_tokens if chunk_tokens is not None and self.running else None
        if most_fed is not None and self.waiting.num_shares > 1:
            most_fed = max(1, most_fed // PARTS_OF_CHUNK)
            budget = min(budget, most_fed)
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting.first
            num_tokens = self._starts.num_to_prefill(sequence)
            is_cut = most_fed is not None and num_tokens > self._starts.num_of_chunk(sequence, most_fed)
            if num_tokens and admission.prefills and (is_cut or num_tokens > budget):
                break
            is_chunk = is_cut or self.kept.has_begun(sequence)
            is_first_prefill = num_tokens and not admission.prefills and not is_chunk
            if is_first_prefill and self.running and not self._is_worth_a_pass():
                break
            if not self._starts.make_room(sequence, bool(self.running)):
                if not self.running and self.kept.give_up_one():  # blocks that another share's prompt keeps
                    continue
                break
            if is_chunk and self.must_preempt:
                break
            if is_cut:
                assert most_fed is not None
                self._starts.feed_chunk(sequence, most_fed, admission)
                break
            budget -= num_tokens
            self._starts.start(self.waiting.start_first(), admission)
            self._enter(sequence)
        for prompt in [prompt for prompt in self.kept.prompts if prompt.num_waiting == 0]:
            self.kept.give_up_prompt(prompt)
        return admission

    def _is_worth_a_pass(self) -> bool:
        """Whether a prefill now would start enough waiting sequences to stop decoding for it.

        Enough is one for every RUNNING_PER_NEWCOMER running sequences, or as many tokens as a pass may have, or all
        waiting sequences, or one of a share that is short of rows.
        """
        num_newcomers = max(1, len(self.running) // RUNNING_PER_NEWCOMER)
        if self._is_short(self.waiting.first.share):
            num_newcomers = 1
        num_free = self.max_running - len(self.running)
        num_tokens, num_blocks, prompt = 0, 0, None
        for sequence in islice(self.waiting, min(num_newcomers, num_free)):
            num_tokens += self._starts.num_to_prefill(sequence) if sequence.prompt is not prompt else 0
            if num_tokens > self.max_prefill_tokens:
                return True
            num_blocks += self._starts.num_blocks(sequence, is_kept=sequence.prompt is prompt)
            prompt = sequence.prompt
        # Blocks that finished sequences keep are given up for waiting ones: see `Starts.make_room`.
        room = self.pool.num_free + self.kept.num_of_sequences
        return num_free >= min(num_newcomers, len(self.waiting)) and num_blocks <= room

    def _enter(self, sequence: Sequence) -> None:
        self.running.append(sequence)
        sequence.slot = self.free_slots.pop(0)
        self.changed.append(sequence)

    def grow(self) -> None:
        """Gives every running sequence a place for its newest token, preempting sequences where needed."""
        for sequence in self.short_of_blocks():
            while not self.pool.num_free and sequence in self.running:
                if not self.kept.give_up_one():
                    self._preempt(self._newest_of_the_largest_share())
            if sequence in self.running:
                sequence.blocks += self.pool.allocate(1)
                self.changed.append(sequence)

    def grow_beside(self, admission: Admission) -> list[Sequence]:
        """Returns the rows that decode in the pass that prefills `admission`, with a place for their newest tokens.

        If blocks are short, it returns none: which row is preempted is decided when all decode. Blocks that the prefill
        writes and the copies read are not allocated, even if they are free.
        """
        entering = set(admission.sequences)
        rows = [row for row in self.rows if row not in entering]
        short = self.short_of_blocks()  # no entering sequence is among them
        busy = {block for prefill in admission.prefills for block in prefill.blocks}
        busy |= {copy.source for copy in admission.copies}
        if short:
            num_busy = sum(self.pool.num_owners[block] == 0 for block in busy)
            self.pool.reuse_idle(len(short) + num_busy - len(self.pool.free))
        free = [block for block in self.pool.free if block not in busy] if short else []
        if len(short) > len(free):
            return []
        for sequence, block in zip(short, free, strict=False):
            self.pool.take(block)
            sequence.blocks.append(block)
            self.changed.append(sequence)
        return rows

    @property
    def must_preempt(self) -> bool:
        """Whether `grow` would find too few free blocks."""
        num_free = self.pool.num_free
        return num_free < len(self.running) and num_free < len(self.short_of_blocks())

    def short_of_blocks(self) -> list[Sequence]:
        """Returns the running sequences whose newest token has no place yet."""
        size = self.block_size  # runs for every row at every turn, so lengths are computed inline
        return [s for s in self.running if len(s.prompt.tokens) + len(s.tokens) > size * len(s.blocks)]

    @property
    def rows(self) -> list[Sequence]:
        """The running sequences in decode order: sorted by block if each has one, so that row i may have block i."""
        return sorted(self.running, key=lambda s: s.blocks[0]) if self.is_contiguous else list(self.running)

    def take_changed(self, rows: list[Sequence] | None = None) -> list[Sequence]:
        """Returns `changed`, or its sequences that are in `rows`, and removes them from it."""
        changed, self.changed = self.changed, []
        if rows is not None:
            among = set(rows)
            self.changed = [sequence for sequence in changed if sequence not in among]
            changed = [sequence for sequence in changed if sequence in among]
        return changed

    def _is_short(self, share: str) -> bool:
        """Whether a share has fewer running rows than its part, and another one has more."""
        if self.waiting.num_shares < 2 or not self.running:
            return False
        counts, part = self.waiting.num_running, len(self.running) // self.waiting.num_shares
        return counts[share] < part < counts[self.waiting.largest_share]

    @property
    def must_make_way(self) -> bool:
        """Whether the first in line, whose share is short of rows, lacks a slot or blocks."""
        if not self.waiting or not self._is_short(self.waiting.first.share):
            return False
        return len(self.running) >= self.max_running or not self._starts.make_room(self.waiting.first, True)

    def make_way(self) -> None:
        """Preempts rows of the largest share as long as `must_make_way`."""
        while self.must_make_way:
            self._preempt(self._newest_of_the_largest_share())

    def _newest_of_the_largest_share(self) -> Sequence:
        share = self.waiting.largest_share
        return next(row for row in reversed(self.running) if row.share == share)

    def _preempt(self, sequence: Sequence) -> None:
        assert len(self.running) > 1, "one sequence alone must fit: checked before the rollout"
        self.recompute(sequence)
        self.num_preemptions += 1

    def recompute(self, sequence: Sequence) -> None:
        """Moves a running sequence to the head of its share's line: it is prefilled again, response included."""
        assert PENDING not in sequence.tokens, "its tokens are needed to recompute it"
        self._leave(sequence)
        self.kept.give_up_begun()  # belongs to the first in line, which may change now
        self.waiting.append_first(sequence)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Stores why a sequence finished; if it runs, removes it and frees its blocks, unless they are kept.

        They are never kept if a sequence is one block, because rows would have to move out of their places for them.
        """
        sequence.finish_reason = reason
        if sequence.slot >= 0:
            if sequence.is_kept and not self.is_contiguous and reason != "cancelled":
                self.kept.sequences[sequence] = None
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if sequence not in self.kept.sequences:
            self.pool.release(sequence.blocks)
            self.states.release(sequence)
        insort(self.free_slots, sequence.slot)
        sequence.slot = -1
        self.waiting.leave(sequence)

    def close_gaps(self) -> list[Copy]:
        """Moves single-block rows down to the blocks that finished rows left; returns the copies to make.

        With a gap that no new sequence filled, every later read of the contiguous cache would gather all of it, so each
        gap is closed by one copy. If sequences may need several blocks, they never move.
        """
        if not self.is_contiguous:
            return []
        copies = []
        high = sorted((s for s in self.running if s.blocks[0] >= len(self.running)), key=lambda s: s.blocks[0])
        for sequence in high:
            if not self.pool.free or self.pool.free[0] >= len(self.running):
                break
            source = sequence.blocks[0]
            target = self.pool.free[0]
            self.pool.release(sequence.blocks)
            self.pool.take(target)
            sequence.blocks = [target]
            self.changed.append(sequence)
            copies.append(Copy(source, target, len(sequence)))
        return copies


class Starts:
    """Starts sequences on blocks of `block_size` tokens, from their first token or from a prefix that `kept` holds."""

    def __init__(self, kept: KeptBlocks, block_size: int) -> None:
        self._kept, self._pool, self._states, self._block_size = kept, kept.pool, kept.states, block_size

    def num_to_prefill(self, sequence: Sequence) -> int:
        """Number of tokens that are fed before a waiting sequence draws: 0 if its prompt's blocks exist."""
        if sequence.prompt.blocks and not sequence.tokens:
            return 0
        return len(sequence) - self._kept.beginning_of(sequence, _is_alone(sequence)).num_fed

    def num_blocks(self, sequence: Sequence, is_kept: bool) -> int:
        """Number of blocks that a waiting sequence takes at its start; with `is_kept` its prompt has some already."""
        is_alone = _is_alone(sequence)
        beginning = self._kept.beginning_of(sequence, is_alone)
        there = sum(self._pool.num_owners[block] > 0 for block in beginning.blocks)  # idle ones are taken
        if is_alone:
            return max(0, self._num_blocks_for(len(sequence)) - there)
        prompt_length = len(sequence.prompt.tokens)
        kept = 0 if is_kept else self._num_blocks_for(prompt_length) - there
        return kept + (1 if prompt_length % self._block_size else 0)

    def num_states(self, sequence: Sequence) -> int:
        """Number of state slots that a waiting sequence takes at its start, with the one of its prompt."""
        is_alone = _is_alone(sequence)
        own = 0 if self._kept.beginning_of(sequence, is_alone).num_fed else 1
        return own if is_alone else 1 + (0 if sequence.prompt.blocks else own)

    def make_room(self, sequence: Sequence, others_run: bool) -> bool:
        """Whether there are blocks and a slot to start a sequence; frees those of finished sequences if needed."""
        can_grow = self._num_blocks_for(sequence.most_fed) > self._num_blocks_for(len(sequence))
        spare = 1 if others_run and can_grow else 0  # without it the new sequence would be the next one preempted
        while not self._has_room(sequence, spare):
            if not self._kept.give_up_sequence(wanted=sequence.begins_from):
                return False
        return True

    def _has_room(self, sequence: Sequence, spare: int) -> bool:
        num_blocks = self.num_blocks(sequence, bool(sequence.prompt.blocks)) + spare
        return num_blocks <= self._pool.num_free and self._states.has_free(self.num_states(sequence))

    def start(self, sequence: Sequence, admission: Admission) -> None:
        """Gives a sequence its blocks and slot, and adds its prefill and copies to `admission`."""
        prompt = sequence.prompt
        if _is_alone(sequence):
            beginning = self._take_beginning(sequence)
            sequence.blocks, sequence.state_slot = beginning.blocks, beginning.state_slot
            self._prefill(sequence, beginning, len(sequence), admission)
        else:
            if not prompt.blocks:
                beginning = self._take_beginning(sequence)
                prompt.blocks, prompt.state_slot = beginning.blocks, beginning.state_slot
                self._kept.prompts.append(prompt)
                self._prefill(prompt, beginning, len(prompt.tokens), admission)
            self._fork(sequence, admission)
        prompt.num_waiting -= 0 if sequence.tokens else 1
        admission.sequences.append(sequence)

    def num_of_chunk(self, sequence: Sequence, most_tokens: int) -> int:
        """Number of tokens of the next chunk of a waiting sequence: about `most_tokens`, without cutting an image's.

        Tokens that see later ones are fed with them.
        """
        images = sequence.prompt.images
        if images is None or not images.spans:
            return most_tokens
        num_fed = self._kept.beginning_of(sequence, _is_alone(sequence)).num_fed
        before, after = images.whole(num_fed + most_tokens)
        return (before if before > num_fed else after) - num_fed

    def feed_chunk(self, sequence: Sequence, num_tokens: int, admission: Admission) -> None:
        """Feeds about the next `num_tokens` of a sequence that keeps waiting, with blocks for all its tokens."""
        num_tokens = self.num_of_chunk(sequence, num_tokens)
        beginning = self._take_beginning(sequence)
        last = beginning.num_fed + num_tokens
        self._kept.begun = Begun(sequence, beginning.blocks, last, beginning.state_slot, beginning.is_decoded)
        self._prefill(sequence, beginning, last, admission)

    def _take_beginning(self, sequence: Sequence) -> Beginning:
        """Returns blocks and slot to prefill a waiting sequence into, with the number of tokens that they hold."""
        is_alone = _is_alone(sequence)
        beginning = self._kept.take_beginning(sequence, is_alone)
        missing = max(0, self._num_blocks_for(len(sequence)) - len(beginning.blocks))
        blocks = beginning.blocks + self._pool.allocate(missing, highest=not is_alone)
        state_slot = beginning.state_slot if beginning.num_fed else self._states.allocate()
        return beginning._replace(blocks=blocks, state_slot=state_slot)

    def _prefill(self, owner: Prompt | Sequence, beginning: Beginning, last: int, admission: Admission) -> None:
        """Adds the prefill of the owner's tokens after `beginning` and before `last`."""
        tokens = owner.tokens if isinstance(owner, Prompt) else owner.prompt.tokens + owner.tokens
        prefill = Prefill(owner, tokens, list(beginning.blocks), beginning.num_fed, last, beginning.state_slot)
        admission.prefills.append(prefill)
        if not beginning.is_decoded:
            self._kept.prefixes.note(prefill)

    def _fork(self, sequence: Sequence, admission: Admission) -> None:
        """Shares the prompt's full blocks, and copies the last partial one and the states."""
        prompt = sequence.prompt
        num_full, num_rest = divmod(len(prompt.tokens), self._block_size)
        sequence.blocks = self._pool.share(prompt.blocks[:num_full])
        if num_rest:
            sequence.blocks += self._pool.allocate(1)
            admission.copies.append(Copy(prompt.blocks[num_full], sequence.blocks[num_full], num_rest))
        if self._states.num_slots:
            sequence.state_slot = self._states.allocate()
            admission.state_copies.append((prompt.state_slot, sequence.state_slot))

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _is_alone(sequence: Sequence) -> bool:
    """Whether a sequence is prefilled for itself: a preempted one, or the last sample of its prompt."""
    prompt = sequence.prompt
    return bool(sequence.tokens) or (not prompt.blocks and prompt.num_waiting == 1)


class WaitingLine:
    """The line of waiting sequences: the share that was served the fewest tokens is first.

    Tokens that are fed and tokens that are drawn count alike. A share that comes back counts as many as the least
    served one, so that it gets nothing for the time when it asked for nothing (the virtual token counter of Sheng et
    al. 2024, "Fairness in Serving Large Language Models", arXiv 2401.00588, algorithm 2).

    Args:
        kept: knows the sequence of whose tokens some have been fed, which stays first.
    """

    def __init__(self, kept: KeptBlocks):
        self._kept = kept
        self._lines: dict[str, deque[Sequence]] = {}  # by share, none empty; least recently served first
        self.num_running: Counter[str] = Counter()
        """Number of running rows of each share."""
        self._served: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[Sequence]:
        """Yields all sequences in the order in which they would start if no running sequence ended."""
        if len(self._lines) == 1:
            yield from next(iter(self._lines.values()))
            return
        coming = WaitingLine(self._kept)
        coming._lines = {share: line.copy() for share, line in self._lines.items()}
        coming.num_running, coming._served = self.num_running.copy(), self._served.copy()
        while coming:
            yield coming.start_first()

    @property
    def first(self) -> Sequence:
        """The sequence that starts next."""
        begun = self._kept.begun
        if begun is not None and len(self._lines) > 1:
            line = self._lines.get(begun.sequence.share)
            if line and line[0] is begun.sequence:
                return begun.sequence
        return self._lines[self._first_share][0]

    @property
    def _first_share(self) -> str:
        return min(self._lines, key=lambda share: (self._served[share], self.num_running[share]))

    @property
    def largest_share(self) -> str:
        """The share with the most running rows."""
        return max(self.num_running, key=self.num_running.__getitem__)

    @property
    def num_shares(self) -> int:
        """Number of shares with waiting or running sequences."""
        return len(self._lines.keys() | self.num_running.keys())

    def append(self, sequence: Sequence) -> None:
        """Appends a sequence to its share's line."""
        share, busy = sequence.share, self._lines.keys() | self.num_running.keys()
        if share not in busy:
            self._served[share] = max(self._served[share], min((self._served[other] for other in busy), default=0))
        self._lines.setdefault(share, deque()).append(sequence)

    def count_turn(self) -> None:
        """Counts a token for each running row."""
        self._served.update(self.num_running)

    def append_first(self, sequence: Sequence) -> None:
        """Puts a sequence at the head of its share's line."""
        self._lines.setdefault(sequence.share, deque()).appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence from its share's line."""
        self._lines[sequence.share].remove(sequence)
        self._drop_if_empty(sequence.share)

    def start_first(self) -> Sequence:
        """Removes the first sequence, which counts as running until `leave`."""
        sequence = self.first
        line = self._lines.pop(sequence.share)
        line.popleft()
        if line:
            self._lines[sequence.share] = line  # after the other shares
        self.num_running[sequence.share] += 1
        self._served[sequence.share] += 0 if sequence.prompt.blocks else len(sequence.prompt.tokens)
        return sequence

    def leave(self, sequence: Sequence) -> None:
        """Stops counting a sequence as running."""
        self.num_running[sequence.share] -= 1
        if not self.num_running[sequence.share]:
            del self.num_running[sequence.share]

    def _drop_if_empty(self, share: str) -> None:
        if not self._lines[share]:
            del self._lines[share]
