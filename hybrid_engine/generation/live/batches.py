"""Live batches, which sequences join and leave while they run, one turn at a time.

Servers and asynchronous rollouts use them through one thread; `opening.py` chooses the kind. `LiveBatch` runs on
containers with whole weights. `OwnBatch` answers one sequence after the other by the `generate()` of a model without
containers, `StagedBatch` takes turns of micro-batches on pipeline stages, and `StreamedBatch` turns over layers that
all processes gather together.
"""

import math
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple, Protocol

from hybrid_engine.config.checks import check_integer
from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.distributed.verdict import Partners
from hybrid_engine.generation.core import Prompt, Sequence
from hybrid_engine.generation.output import ScoringTurns, score_prompts
from hybrid_engine.generation.rollout.generator import Generator
from hybrid_engine.generation.rollout.module_rollouts import (
    IDLE,
    STREAMED_STAYS,
    WORKS,
    JointModulePasses,
    JointTurns,
    answer_sequence,
)
from hybrid_engine.generation.rollout.stages import MicroBatch, OrderedTurns
from hybrid_engine.generation.step import ContainerRollouts, ContinuousBatch
from hybrid_engine.ops.dispatch import naming_kernels

TOKENS_OF_A_TURN = 16
"""Minimum number of tokens of a turn; a quarter of a longer sequence, so that it is fed again less often."""


class Progress(NamedTuple):
    """Result of a turn for one sequence."""

    sequence: Sequence
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str | None
    """Why the sequence ended; None: more is to come.

    "error": a rule of its own failed (`sequence.error`), the model's logits are not finite, or the batch ended.
    """


class KVUsage(NamedTuple):
    """Use of the blocks of a KV workspace."""

    used: int
    """Number of blocks of sequences that run or have started."""
    kept: int
    """Number of blocks that only later requests may need, for their conversation or a prompt that begins like an
    earlier one; reused if others need them."""
    free: int
    num_prompt_tokens: int = 0
    """Number of tokens of all prompts that were prefilled since the batch began."""
    num_reused_tokens: int = 0
    """Number of those whose keys and values existed already."""

    @property
    def usage(self) -> float:
        """Share of the blocks that is used, from 0 to 1."""
        return self.used / max(1, self.used + self.kept + self.free)


class LiveBatch(Protocol):
    """A batch that sequences join and leave while it runs. One thread owns it and calls it between its turns."""

    longest: int
    """Number of tokens of the longest sequence that fits, including the last one drawn."""

    @property
    def seconds_between_stays(self) -> float | None:
        """Seconds between required calls of `stay`; None: no calls are required."""

    @property
    def has_work(self) -> bool:
        """Whether a turn has a result."""

    @property
    def num_running(self) -> int:
        """Number of sequences that decode now."""

    @property
    def num_waiting(self) -> int:
        """Number of sequences that have not started, or start again."""

    @property
    def kv_blocks(self) -> KVUsage:
        """Use of the KV blocks. May be called by another thread."""

    @property
    def unfinished(self) -> list[Sequence]:
        """All sequences for which progress is still to come."""

    def add(self, sequences: list[Sequence]) -> None:
        """Queues `sequences`. Each must fit: prompt and answer within `longest` tokens."""

    def cancel(self, sequences: list[Sequence]) -> None:
        """Removes `sequences` at once, whether they run or wait; finished ones are not changed."""

    def take_out(self) -> list[Progress]:
        """Removes all sequences so that another batch can continue them; returns the progress not reported yet."""

    def turn(self) -> list[Progress]:
        """Takes one step of the batch; returns its progress, in the order in which the sequences were added."""

    def stay(self) -> None:
        """Called at least every `seconds_between_stays`, even without requests."""


class SettledBatch(LiveBatch, Protocol):
    """A live batch whose weights may change between two turns."""

    def settle(self) -> list[Progress]:
        """Reads the messages of other processes about earlier turns, before weights change; returns their progress."""


class ContainerBatch:
    """A live batch on containers with whole weights.

    Args:
        model: model that `strategy` runs.
        strategy: takes the turns, over a scheduler that may be empty.
        longest: number of tokens of the longest sequence that fits, including the last one drawn.
    """

    seconds_between_stays = None

    def __init__(self, model: InferenceModel, strategy: ContinuousBatch, longest: int):
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
    def kv_blocks(self) -> KVUsage:
        """Use of the KV blocks. May be called by another thread."""
        pool, kept = self.scheduler.pool, self.scheduler.kept
        num_free, num_kept = len(pool.free), kept.num_given_up_on_demand + len(pool.idle)
        num_used = max(0, pool.num_blocks - num_free - num_kept)
        return KVUsage(num_used, num_kept, num_free, kept.num_prompt_tokens, kept.num_reused_tokens)

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
            if not sequence.prompt.is_unscored:
                self.scheduler.add(sequence)
        self._unscored = [sequence for sequence in self._unscored if sequence.prompt.is_unscored]

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
                self.strategy.step()
        return self.tell()

    def settle(self) -> list[Progress]:
        """Returns no progress: no process has messages. See `SettledBatch.settle`."""
        return []

    def stay(self) -> None:
        """Does nothing: no process waits for this one."""

    def take_pass(self) -> None:
        """Makes one pass over the layers, even if there is nothing to compute."""
        with naming_kernels():
            if not self._scoring.turn():
                self._join_scored()
                self.strategy.step()

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


class OwnBatch:
    """Answers sequences in the order of their arrival by the model's own `generate()`, a part of an answer per turn.

    If they are of several shares (`Sequence.share`), the shares take turns.

    A turn feeds the whole sequence again, so no state is kept between turns: the next one may be another sequence's.

    Args:
        generator: generator without containers, its weights gathered.
        longest: number of tokens of the longest sequence that may join.
        passes: keeps the model's forward passes in step with those of other processes; None: no process waits for them.
    """

    def __init__(self, generator: Generator, longest: int, passes: JointModulePasses | None = None):
        self.generator, self.longest, self._passes = generator, longest, passes
        self.seconds_between_stays = None if passes is None else STREAMED_STAYS
        self._num_told: dict[Sequence, int] = {}
        self._turns: dict[str, int] = {}  # number of each share's last turn

    @property
    def has_work(self) -> bool:
        """Whether a sequence is unfinished."""
        return bool(self._num_told)

    @property
    def num_running(self) -> int:
        """1 if a sequence is unfinished, else 0: one is answered at a time."""
        return min(1, len(self._num_told))

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for the running one."""
        return len(self._num_told) - self.num_running

    @property
    def kv_blocks(self) -> KVUsage:
        """No blocks: the model has a cache of its own."""
        return KVUsage(0, 0, 0)

    @property
    def unfinished(self) -> list[Sequence]:
        """All sequences for which progress is still to come."""
        return list(self._num_told)

    def add(self, sequences: list[Sequence]) -> None:
        """Queues `sequences` for their turns."""
        self.score(list(dict.fromkeys(sequence.prompt for sequence in sequences)))
        for sequence in sequences:
            sequence.is_kept = False
            self._num_told[sequence] = len(sequence.tokens)

    def score(self, prompts: list[Prompt]) -> None:
        """Scores those of `prompts` that request it, by the model's forward."""
        self.generator.own.score(prompts, self.generator.device)

    def cancel(self, sequences: list[Sequence]) -> None:
        """Removes `sequences`; finished ones are not changed."""
        for sequence in sequences:
            self._num_told.pop(sequence, None)

    def take_out(self) -> list[Progress]:
        """Removes all sequences; all their progress was reported already."""
        self._num_told.clear()
        return []

    def stay(self) -> None:
        """Takes part in passes of other processes; if there is work here, its next pass does."""
        if self._passes is not None and not self.has_work:
            self._passes.meet(IDLE)

    def turn(self) -> list[Progress]:
        """Continues the answer of the sequence that waits longest, of each share in turn."""
        sequence = self._take_next()
        first = self._num_told[sequence]
        most = max(TOKENS_OF_A_TURN, len(sequence) // 4)
        try:
            with nullcontext() if self._passes is None else self._passes.ending_pass():
                answer_sequence(self.generator.own.generate, sequence, self.generator.device, most)
        except Exception as error:
            if self._passes is not None and self._passes.has_parted:
                raise
            sequence.error = sequence.error or error
        if sequence.error is not None or sequence.finish_reason is not None:
            self._num_told.pop(sequence)
        else:
            self._num_told[sequence] = len(sequence.tokens)
        if sequence.error is not None:
            return [Progress(sequence, [], [], "error")]
        return [Progress(sequence, sequence.tokens[first:], sequence.logprobs[first:], sequence.finish_reason)]

    def _take_next(self) -> Sequence:
        firsts = {sequence.share: sequence for sequence in reversed(self._num_told)}
        share = min(firsts, key=lambda share: self._turns.get(share, 0))
        self._turns = {name: self._turns.get(name, 0) for name in firsts} | {
            share: max(self._turns.values(), default=0) + 1
        }
        return firsts[share]


def open_own(generator: Generator, longest: int | None, release: ExitStack, caller: str) -> OwnBatch:
    """Opens a batch of `generator`, which has no containers; registers what must be released on `release`.

    Errors name `caller`.

    Raises:
        ValueError: processes share the model, or `longest` is out of range.
    """
    if generator.group.size > 1:
        raise ValueError(
            f"{caller}: {generator.fallback_reason}, and {generator.group.size} processes can only share a model "
            f"with containers; set {generator.group.remedy}"
        )
    positions = getattr(generator.module.config.get_text_config(), "max_position_embeddings", None)
    limit = min(generator.config.max_out_tokens, positions or generator.config.max_out_tokens)
    check_integer("longest", limit if longest is None else longest, 2, limit)
    generator.own.gather(release)
    passes = generator.own.joint_passes()
    return OwnBatch(generator, longest or limit, None if passes is None else release.enter_context(passes.joined()))


class StagedBatch:
    """The micro-batches of a pipeline as one batch; every stage makes the same calls.

    Args:
        batches: micro-batches that take turns by `turns`.
    """

    seconds_between_stays = None

    def __init__(self, model: InferenceModel, batches: list[MicroBatch], longest: int, turns: OrderedTurns):
        self.model, self.longest = model, longest
        self._turns = turns
        self._parts = [ContainerBatch(model, batch, longest) for batch in batches]
        self._settled: list[Progress] = []  # not reported yet
        self._next = 0

    @property
    def has_work(self) -> bool:
        """Whether a turn has a result, which may be an error that occurred before."""
        return bool(self._turns.failed or self._settled) or any(part.has_work for part in self._parts)

    @property
    def num_running(self) -> int:
        """Number of sequences that decode now."""
        return sum(part.num_running for part in self._parts)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that have not started, or start again."""
        return sum(part.num_waiting for part in self._parts)

    @property
    def kv_blocks(self) -> KVUsage:
        """Use of the KV blocks of all micro-batches on this stage; those of other stages are equal."""
        return KVUsage(*map(sum, zip(*(part.kv_blocks for part in self._parts), strict=True)))

    @property
    def unfinished(self) -> list[Sequence]:
        """All sequences for which progress is still to come."""
        return [sequence for part in self._parts for sequence in part.unfinished]

    def add(self, sequences: list[Sequence]) -> None:
        """See `LiveBatch.add`.

        Samples of a prompt go together, and a continued sequence goes where the earlier one was.
        """
        self.score(list(dict.fromkeys(sequence.prompt for sequence in sequences)))
        of_prompts: dict[Prompt, list[Sequence]] = {}
        for sequence in sequences:
            of_prompts.setdefault(sequence.prompt, []).append(sequence)
        for samples in of_prompts.values():
            part = self._choose_part(samples)
            if part.strategy not in self._turns.failed:
                part.add(samples)

    def _choose_part(self, samples: list[Sequence]) -> ContainerBatch:
        for sequence in samples:
            for part in self._parts:
                if sequence.begins_from in part.scheduler.kept.sequences:
                    return part
        return min(self._parts, key=lambda part: len(part.unfinished))

    def score(self, prompts: list[Prompt]) -> None:
        """See `LiveBatch.score`; makes passes through all stages."""
        wanted = [prompt for prompt in prompts if prompt.is_unscored]
        if wanted:
            self._settled += self.settle()  # a pass through all stages has messages of its own
            score_prompts(self.model, wanted)

    def cancel(self, sequences: list[Sequence]) -> None:
        """Removes `sequences` from their micro-batches, whether they run or wait."""
        for part in self._parts:
            if part.strategy not in self._turns.failed:
                part.cancel(sequences)

    def take_out(self) -> list[Progress]:
        """Removes all sequences from all micro-batches; returns the progress not reported yet."""
        self._turns.read_all()
        settled, self._settled = self._settled, []
        return settled + [told for part in self._parts for told in part.take_out()]

    def stay(self) -> None:
        """Does nothing: the stages of a process group make the same calls."""

    def settle(self) -> list[Progress]:
        """Reads the last stage's messages about earlier turns; returns their progress."""
        self._turns.read_all()
        return [told for part in self._parts for told in part.tell()]

    def turn(self) -> list[Progress]:
        """Takes a turn of the next micro-batch that has work; returns the progress of its previous one."""
        settled, self._settled = self._settled, []
        places = [(self._next + step) % len(self._parts) for step in range(len(self._parts))]
        for place in places:
            part = self._parts[place]
            if part.has_work or part.strategy in self._turns.failed:
                self._next = place + 1
                self._turns.read(part.strategy)  # type: ignore[arg-type]
                progress = part.tell()
                if part.has_work:
                    self._turns.take(part.strategy)  # type: ignore[arg-type]
                return settled + progress
        return settled


class StreamedBatch:
    """A live batch whose turns are taken by all processes together, each with a pass over the streamed layers.

    Args:
        native: runs a turn over the stream.
        partners: processes whose layers are gathered with this one's.
    """

    seconds_between_stays = STREAMED_STAYS

    def __init__(self, batch: ContainerBatch, native: ContainerRollouts, partners: Partners):
        self._batch, self.longest = batch, batch.longest
        self._turns = JointTurns(partners, lambda: native.pass_over_stream(batch.take_pass))

    @property
    def has_work(self) -> bool:
        """Whether a turn has a result for this process."""
        return self._batch.has_work

    @property
    def num_running(self) -> int:
        """Number of sequences of this process that decode now."""
        return self._batch.num_running

    @property
    def num_waiting(self) -> int:
        """Number of sequences of this process that have not started, or start again."""
        return self._batch.num_waiting

    @property
    def kv_blocks(self) -> KVUsage:
        """Use of this process's KV blocks."""
        return self._batch.kv_blocks

    @property
    def unfinished(self) -> list[Sequence]:
        """All sequences of this process for which progress is still to come."""
        return self._batch.unfinished

    def add(self, sequences: list[Sequence]) -> None:
        """Queues `sequences`, whose prompts are scored in the passes of turns. See `LiveBatch.add`."""
        self._batch.add(sequences)

    def cancel(self, sequences: list[Sequence]) -> None:
        """Removes `sequences`, whether they run or wait."""
        self._batch.cancel(sequences)

    def take_out(self) -> list[Progress]:
        """Removes all sequences; returns the progress not reported yet."""
        return self._batch.take_out()

    def turn(self) -> list[Progress]:
        """Makes one pass over the layers, on all processes."""
        self._turns.meet(WORKS)
        return self._batch.tell()

    def stay(self) -> None:
        """Takes part in the turns of others; if there is work here, its next turn does."""
        if not self.has_work:
            self._turns.meet(IDLE)

    def leaving(self) -> AbstractContextManager[None]:
        """On exit, takes part in the turns of others until all have left; raises an error inside on all."""
        return self._turns.leaving()
