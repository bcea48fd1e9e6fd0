"""What a waiting sequence needs before it draws its first token, and what it gets. Plain Python.

One that runs for itself has all its tokens prefilled. Samples of one prompt share its prefill: each has the prompt's
full blocks in common with the others, and a copy of the last partial one.
"""

from hybrid_engine.generation.batching.admission import Admission, Copy, Prefill
from hybrid_engine.generation.batching.kept_blocks import Begun, KeptBlocks
from hybrid_engine.generation.batching.sequence import Prompt, Sequence


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
