"""The scheduler of continuous batching: plain Python over prompts, sequences and block numbers, without tensors.

At most `max_running` sequences decode at once; a finished one leaves at once, and the next waiting ones take its place.
A prompt is prefilled once; its samples share its full blocks and copy the last partial one. When blocks run out,
prompts kept for later samples are released first, then the newest running sequence is preempted: its blocks are freed,
and it is prefilled again later, response included. `Starts` (`blocks.py`) decides which blocks a starting sequence
takes, and `waiting_line.py` which sequence is first in line. If there are several shares, the newest sequence of the
largest share is preempted, also to make way for a share that has fewer rows than its part.

A pass with a prefill is not a recorded step, and running sequences wait for it unless they can decode in the same pass
(see `grow_beside`), so prompts enter in bulk: see `_is_worth_a_pass`. Samples of a prompt that is prefilled already
enter at once. A prompt that would make others wait long is fed in chunks, one per turn, and the others decode in the
same passes: see `admit`.
"""

from bisect import insort
from collections.abc import Iterable
from itertools import islice

from hybrid_engine.generation.batching.blocks import BlockPool, KeptBlocks, Starts
from hybrid_engine.generation.batching.waiting_line import WaitingLine
from hybrid_engine.generation.request.core import PENDING, Admission, Copy, Sequence

# Running sequences per sequence that a prefill must start. With 1 024 prompts over 256 slots and answers of 256 tokens
# on average there are 58 prefill turns instead of 511, and 1 777 decode turns instead of 1 746: 2.5% of the slots wait.
RUNNING_PER_NEWCOMER = 16


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
    ):
        """Queues `sequences`.

        `longest`: number of tokens that are fed of the longest sequence ever added; None: of the longest of
        `sequences`.
        """
        self.pool = BlockPool(num_blocks)
        self.kept = KeptBlocks(self.pool)
        self.waiting = WaitingLine(self.kept)
        for sequence in sequences:
            self.add(sequence)
        self.running: list[Sequence] = []  # oldest first
        self._starts = Starts(self.kept, block_size)
        self.max_running, self.block_size, self.max_prefill_tokens = max_running, block_size, max_prefill_tokens
        if longest is None:
            longest = max((sequence.most_fed for sequence in self.waiting), default=0)
        self.is_contiguous = longest <= block_size  # every sequence fits one block
        self.free_slots = list(range(max_running))
        self.changed: list[Sequence] = []  # started, or blocks changed, since `take_changed`
        self.num_preemptions = 0

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
        with the last chunk.
        """
        admission, budget = Admission(), self.max_prefill_tokens
        most_fed = chunk_tokens if chunk_tokens is not None and self.running else None
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting.first
            num_tokens = self._starts.num_to_prefill(sequence)
            is_cut = most_fed is not None and num_tokens > most_fed
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
        room = len(self.pool.free) + self.kept.num_of_sequences
        return num_free >= min(num_newcomers, len(self.waiting)) and num_blocks <= room

    def _enter(self, sequence: Sequence) -> None:
        self.running.append(sequence)
        sequence.slot = self.free_slots.pop(0)
        self.changed.append(sequence)

    def grow(self) -> None:
        """Gives every running sequence a place for its newest token, preempting sequences where needed."""
        for sequence in self.short_of_blocks():
            while not self.pool.free and sequence in self.running:
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
        num_free = len(self.pool.free)
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
