"""Who runs next. Plain Python over prompts, sequences and block numbers; no tensor library.

Continuous batching: at most `max_running` sequences decode at once, a finished one leaves at once and the next waiting
ones take its place. A prompt is prefilled once; its samples share its full blocks and copy the last partial one. When
blocks run out, prompts kept for later samples go first, then the newest running sequence is preempted: its blocks are
freed and it is prefilled again later, response included. What a sequence takes when it starts is decided by `Starts`
(`blocks.py`), and who is first in line `waiting_line.py`'s. Where sequences are of several shares, the newest one of
the largest share is preempted, also for a share that has fewer places than its part of them.

A pass with a prefill is no recorded step, and what runs waits for it where it cannot decode in the same pass (see
`grow_beside`), so prompts enter in bulk: see `_is_worth_a_pass`. Samples of a prompt that is prefilled already enter at
once. A prompt that would make others wait long is fed in chunks, one a turn, beside which they decode: see `admit`.
"""

from bisect import insort
from collections.abc import Iterable
from itertools import islice

from hybrid_engine.generation.batching.blocks import BlockPool, KeptBlocks, Starts
from hybrid_engine.generation.batching.waiting_line import WaitingLine
from hybrid_engine.generation.request.core import PENDING, Admission, Copy, Sequence

# A prefill starts a sequence for every so many that run. With 1 024 prompts over 256 slots and answers of 256 tokens in
# the mean there are 58 prefill turns instead of 511, and 1 777 decode turns instead of 1 746: 2.5% of the slots wait.
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
        """`longest`: tokens that are fed of the longest sequence; None: of `sequences`, and no longer one is added."""
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
        self.changed: list[Sequence] = []  # started, or whose blocks changed, since somebody emptied the list
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence at the end of its share's line; one that has tokens already goes on from them."""
        sequence.prompt.num_waiting += 0 if sequence.tokens else 1
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Takes out a sequence that waits or runs, which then counts as finished."""
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

        With `chunk_tokens`, while others run a longer prompt is fed so many tokens of it a turn, and enters with the
        last of them.
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
                if not self.running and self.kept.give_up_one():  # what another share's prompt keeps
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
        """Whether a prefill would now start enough of those that wait to stop decoding for it.

        Enough is one for every RUNNING_PER_NEWCOMER that run, or as many tokens as a pass may have, or all that wait,
        or one of a share that is short of rows.
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
        # What finished sequences keep is given up for those that wait: see `Starts.make_room`.
        room = len(self.pool.free) + self.kept.num_of_sequences
        return num_free >= min(num_newcomers, len(self.waiting)) and num_blocks <= room

    def _enter(self, sequence: Sequence) -> None:
        self.running.append(sequence)
        sequence.slot = self.free_slots.pop(0)
        self.changed.append(sequence)

    def grow(self) -> None:
        """Gives every running sequence a place for its newest token, preempting the newest where needed."""
        for sequence in self.short_of_blocks():
            while not self.pool.free and sequence in self.running:
                if not self.kept.give_up_one():
                    self._preempt(self._newest_of_the_largest_share())
            if sequence in self.running:
                sequence.blocks += self.pool.allocate(1)
                self.changed.append(sequence)

    def grow_beside(self, admission: Admission) -> list[Sequence]:
        """Those that decode in the pass that prefills `admission`, with a place for their newest tokens; maybe none.

        Where blocks are short none do: who has to go is decided when all decode. What the prefill writes and the copies
        read is left alone, though it may belong to nobody any more.
        """
        entering = set(admission.sequences)
        rows = [row for row in self.rows if row not in entering]
        short = self.short_of_blocks()  # nobody who enters is among them
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
        """Whether `grow` would find too few blocks."""
        num_free = len(self.pool.free)
        return num_free < len(self.running) and num_free < len(self.short_of_blocks())

    def short_of_blocks(self) -> list[Sequence]:
        """Running sequences whose newest token has no place yet."""
        size = self.block_size  # asked at every turn of every row: the lengths are counted here, not by a call for each
        return [s for s in self.running if len(s.prompt.tokens) + len(s.tokens) > size * len(s.blocks)]

    @property
    def rows(self) -> list[Sequence]:
        """What runs, in the order in which it is decoded: by blocks where each has one, that row i may own block i."""
        return sorted(self.running, key=lambda s: s.blocks[0]) if self.is_contiguous else list(self.running)

    def take_changed(self, rows: list[Sequence] | None = None) -> list[Sequence]:
        """`changed`, which is empty afterwards; or those of it that are `rows`, and the others stay."""
        changed, self.changed = self.changed, []
        if rows is not None:
            among = set(rows)
            self.changed = [sequence for sequence in changed if sequence not in among]
            changed = [sequence for sequence in changed if sequence in among]
        return changed

    def _is_short(self, share: str) -> bool:
        """Whether a share has fewer running rows than its part of them, and another one has more."""
        if self.waiting.num_shares < 2 or not self.running:
            return False
        counts, part = self.waiting.num_running, len(self.running) // self.waiting.num_shares
        return counts[share] < part < counts[self.waiting.largest_share]

    @property
    def must_make_way(self) -> bool:
        """Whether the first in line, whose share is short of rows, finds no place or no blocks."""
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
        """Sends a running sequence back to the head of its share's line: it is prefilled anew, response included."""
        assert PENDING not in sequence.tokens, "its tokens are needed to recompute it"
        self._leave(sequence)
        self.kept.give_up_begun()  # the first one's in line, which may be another now
        self.waiting.append_first(sequence)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Notes why a sequence finished; takes it out and frees its blocks if it still runs, unless they are kept.

        Where a sequence is one block they never are: rows would have to move out of their places for them.
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

        A gap that no newcomer filled would turn every later read of the contiguous cache into a gather of all
        of it, so each is closed by one copy. Where sequences may need several blocks they never move.
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
