"""A batch that sequences join and leave while it runs, one turn at a time."""

import math
from typing import NamedTuple

from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.generation.batching.continuous_batching import TextGeneration
from hybrid_engine.generation.model.scoring import ScoringTurns, is_unscored
from hybrid_engine.generation.request.core import Prompt, Sequence
from hybrid_engine.ops.kernel_errors import naming_kernels


class Progress(NamedTuple):
    """What a turn brought for one sequence."""

    sequence: Sequence
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str | None
    """None: more is to come. "error": a rule of its own failed (`sequence.error`), the model's logits are not finite,
    or the batch came to its end."""


class KVBlocks(NamedTuple):
    """What the blocks of a KV workspace are for."""

    used: int
    """Of sequences that run, or have begun."""
    kept: int
    """Of finished sequences alone, for a conversation to go on from; given up where others need them."""
    free: int

    @property
    def usage(self) -> float:
        """The share that is used, from 0 to 1."""
        return self.used / max(1, sum(self))


class LiveBatch:
    """Takes turns for whoever is in it. One thread owns it.

    Args:
        model: what `strategy` runs.
        strategy: takes the turns, over a scheduler that may be empty.
        longest: tokens of the longest sequence that fits, the last one drawn included.
    """

    seconds_between_stays: float | None = None
    """How often `stay` must be called; None: never."""

    def __init__(self, model: InferenceModel, strategy: TextGeneration, longest: int):
        self.model, self.strategy, self.scheduler, self.longest = model, strategy, strategy.scheduler, longest
        strategy.raises_errors = False  # they end the sequence that has them
        self._num_told: dict[Sequence, int] = {}  # of each unfinished sequence, the tokens that were handed on
        self._scoring = ScoringTurns(model, lambda: strategy.layers())
        self._unscored: list[Sequence] = []  # they join the scheduler once their prompts are scored

    @property
    def has_work(self) -> bool:
        """Whether a turn would bring something."""
        return self.strategy.has_work or bool(self._unscored)

    @property
    def num_running(self) -> int:
        """Sequences that decode now."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that have not begun, or begin again."""
        return len(self.scheduler.waiting) + len(self._unscored)

    @property
    def kv_blocks(self) -> KVBlocks:
        """What blocks are for. May be asked by another thread."""
        pool, kept = self.scheduler.pool, self.scheduler.kept.num_given_up_on_demand
        num_free = len(pool.free)
        return KVBlocks(max(0, pool.num_blocks - num_free - kept), kept, num_free)

    @property
    def unfinished(self) -> list[Sequence]:
        """All that something is still to come for."""
        return list(self._num_told)

    def add(self, sequences: list[Sequence]) -> None:
        """Lets `sequences` wait for a place. Each must fit: its prompt and answer within `longest` tokens."""
        self.score(list(dict.fromkeys(sequence.prompt for sequence in sequences)))
        for sequence in sequences:
            if self.model.angles.trained_length is not None:  # keys belong to other frequencies in a longer sequence
                sequence.is_kept = False
            self._num_told[sequence] = len(sequence.tokens)  # one that goes on has some already
            self._unscored.append(sequence)
        self._join_scored()

    def score(self, prompts: list[Prompt]) -> None:
        """Sees to it that those of `prompts` which want scores have them before their sequences end."""
        self._scoring.add(prompts)

    def _join_scored(self) -> None:
        for sequence in self._unscored:
            if not is_unscored(sequence.prompt):
                self.scheduler.add(sequence)
        self._unscored = [sequence for sequence in self._unscored if is_unscored(sequence.prompt)]

    def cancel(self, sequences: list[Sequence]) -> None:
        """Takes `sequences` out at once, whether they run or wait; those that have finished stay as they are."""
        for sequence in sequences:
            if self._num_told.pop(sequence, None) is not None and sequence.finish_reason is None:
                if sequence in self._unscored:
                    self._unscored.remove(sequence)
                    sequence.finish_reason = "cancelled"
                else:
                    self.scheduler.cancel(sequence)
        self._scoring.keep({sequence.prompt for sequence in self._unscored})

    def take_out(self) -> list[Progress]:
        """Takes everything out, for another batch to go on with; returns what was drawn and not handed on yet."""
        self.strategy.read_all()
        progress = self.tell()
        left = self.unfinished
        self.cancel(left)
        for sequence in left:
            sequence.finish_reason = None
        return progress

    def turn(self) -> list[Progress]:
        """One pass over the layers; what it brought, in the order in which the sequences were added.

        Where prompts are to be scored there is another one before it.
        """
        with naming_kernels():
            self._scoring.turn()
            self._join_scored()
            if self.strategy.has_work:
                self.strategy.turn()
        return self.tell()

    def settle(self) -> list[Progress]:
        """Reads what other processes have still to tell of earlier turns, before weights change; what that brought."""
        return []

    def stay(self) -> None:
        """Called in that time, also where nothing is asked."""

    def tell(self) -> list[Progress]:
        """What was read and not handed on yet."""
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
            sequence.processors = sequence.begins_from = None  # a kept sequence may stay for long
        return Progress(sequence, tokens, logprobs, sequence.finish_reason if is_complete else None)
