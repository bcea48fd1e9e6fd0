"""A batch that sequences join and leave while it runs, one turn at a time; servers and asynchronous rollouts use it."""

import math
from typing import NamedTuple

from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.generation.batching.continuous_batching import TextGeneration
from hybrid_engine.generation.model.scoring import ScoringTurns, is_unscored
from hybrid_engine.generation.request.core import Prompt, Sequence
from hybrid_engine.ops.kernel_errors import naming_kernels


class Progress(NamedTuple):
    """Result of a turn for one sequence."""

    sequence: Sequence
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str | None
    """Why the sequence ended; None: more is to come.

    "error": a rule of its own failed (`sequence.error`), the model's logits are not finite, or the batch ended.
    """


class KVBlocks(NamedTuple):
    """Use of the blocks of a KV workspace."""

    used: int
    """Number of blocks of sequences that run or have started."""
    kept: int
    """Number of blocks only of finished sequences, which a conversation may continue; freed if others need them."""
    free: int

    @property
    def usage(self) -> float:
        """Share of the blocks that is used, from 0 to 1."""
        return self.used / max(1, sum(self))


class LiveBatch:
    """Takes turns for the sequences in it. One thread owns it.

    Args:
        model: model that `strategy` runs.
        strategy: takes the turns, over a scheduler that may be empty.
        longest: number of tokens of the longest sequence that fits, including the last one drawn.
    """

    seconds_between_stays: float | None = None
    """Seconds between required calls of `stay`; None: no calls are required."""

    def __init__(self, model: InferenceModel, strategy: TextGeneration, longest: int):
        self.model, self.strategy, self.scheduler, self.longest = model, strategy, strategy.scheduler, longest
        strategy.raises_errors = False  # an error ends its sequence only
        self._num_told: dict[Sequence, int] = {}  # number of reported tokens of each unfinished sequence
        self._scoring = ScoringTurns(model, lambda: strategy.layers())
        self._unscored: list[Sequence] = []  # they join the scheduler once their prompts are scored

    @property
    def has_work(self) -> bool:
        """Whether a turn has a result."""
        return self.strategy.has_work or bool(self._unscored)

    @property
    def num_running(self) -> int:
        """Number of sequences that decode now."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that have not started, or start again."""
        return len(self.scheduler.waiting) + len(self._unscored)

    @property
    def kv_blocks(self) -> KVBlocks:
        """Use of the KV blocks. May be called by another thread."""
        pool, kept = self.scheduler.pool, self.scheduler.kept.num_given_up_on_demand
        num_free = len(pool.free)
        return KVBlocks(max(0, pool.num_blocks - num_free - kept), kept, num_free)

    @property
    def unfinished(self) -> list[Sequence]:
        """All sequences for which progress is still to come."""
        return list(self._num_told)

    def add(self, sequences: list[Sequence]) -> None:
        """Queues `sequences`. Each must fit: prompt and answer within `longest` tokens."""
        self.score(list(dict.fromkeys(sequence.prompt for sequence in sequences)))
        for sequence in sequences:
            if self.model.angles.trained_length is not None:  # keys have other frequencies in a longer sequence
                sequence.is_kept = False
            self._num_told[sequence] = len(sequence.tokens)  # a continued sequence has some already
            self._unscored.append(sequence)
        self._join_scored()

    def score(self, prompts: list[Prompt]) -> None:
        """Ensures that those of `prompts` that request scores have them before their sequences end."""
        self._scoring.add(prompts)

    def _join_scored(self) -> None:
        for sequence in self._unscored:
            if not is_unscored(sequence.prompt):
                self.scheduler.add(sequence)
        self._unscored = [sequence for sequence in self._unscored if is_unscored(sequence.prompt)]

    def cancel(self, sequences: list[Sequence]) -> None:
        """Removes `sequences` at once, whether they run or wait; finished ones are not changed."""
        for sequence in sequences:
            if self._num_told.pop(sequence, None) is not None and sequence.finish_reason is None:
                if sequence in self._unscored:
                    self._unscored.remove(sequence)
                    sequence.finish_reason = "cancelled"
                else:
                    self.scheduler.cancel(sequence)
        self._scoring.keep({sequence.prompt for sequence in self._unscored})

    def take_out(self) -> list[Progress]:
        """Removes all sequences so that another batch can continue them; returns the progress not reported yet."""
        self.strategy.read_all()
        progress = self.tell()
        left = self.unfinished
        self.cancel(left)
        for sequence in left:
            sequence.finish_reason = None
        return progress

    def turn(self) -> list[Progress]:
        """Makes one pass over the layers; returns its progress, in the order in which the sequences were added.

        If prompts are to be scored, another pass comes before it.
        """
        with naming_kernels():
            self._scoring.turn()
            self._join_scored()
            if self.strategy.has_work:
                self.strategy.turn()
        return self.tell()

    def settle(self) -> list[Progress]:
        """Reads the messages of other processes about earlier turns, before weights change; returns their progress."""
        return []

    def stay(self) -> None:
        """Called at least every `seconds_between_stays`, even without requests."""

    def tell(self) -> list[Progress]:
        """Returns the progress that was read and not reported yet."""
        progress = [told for sequence in list(self._num_told) if (told := self._tell(sequence)) is not None]
        for told in progress:
            if told.finish_reason is not None:
                del self._num_told[told.sequence]
        return progress

    def _tell(self, sequence: Sequence) -> Progress | None:
        if sequence.error is not None:
            if sequence.finish_reason is None:
                self.scheduler.cancel(sequence)
            return Progress(sequence, [], [], "error")
        first, known = self._num_told[sequence], len(sequence.logprobs)
        # A sequence that ran out of new tokens has finished before its last tokens came back from the device.
        is_complete = sequence.finish_reason is not None and known == len(sequence.tokens)
        if known == first and not is_complete:
            return None
        tokens, logprobs = sequence.tokens[first:known], sequence.logprobs[first:known]
        if not all(map(math.isfinite, logprobs)):
            self.scheduler.cancel(sequence)
            return Progress(sequence, [], [], "error")
        self._num_told[sequence] = known
        if is_complete:
            sequence.processors = sequence.begins_from = None  # a kept sequence may stay for a long time
        return Progress(sequence, tokens, logprobs, sequence.finish_reason if is_complete else None)
