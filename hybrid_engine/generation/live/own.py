"""A live batch of a model without containers: its own `generate()` answers one sequence after the other."""

from contextlib import ExitStack, nullcontext

from hybrid_engine.config.checks import check_integer
from hybrid_engine.generation.batching.sequence import Prompt, Sequence
from hybrid_engine.generation.generator import Generator
from hybrid_engine.generation.joint_turns import IDLE, STREAMED_STAYS, JointPasses
from hybrid_engine.generation.live.batch import KVBlocks, LiveBatch, Progress
from hybrid_engine.generation.own_sequences import answer_sequence

TOKENS_OF_A_TURN = 16
"""At least, and a quarter of the sequence, so that a long one is fed anew less often."""


class OwnBatch(LiveBatch):
    """Answers those that were added in their order, a part of an answer a turn, by the model's own `generate()`.

    Where they are of several shares (`Sequence.share`), turns go to each share in turn.

    A turn feeds the sequence anew, so that nothing is kept between turns: the next one may be another's.

    Args:
        generator: without containers, its weights gathered.
        longest: tokens of the longest sequence that may join.
        passes: keeps the model's forward passes in step with those of other processes; None: nobody waits for them.
    """

    def __init__(self, generator: Generator, longest: int, passes: JointPasses | None = None):
        self.generator, self.longest, self._passes = generator, longest, passes
        self.seconds_between_stays = None if passes is None else STREAMED_STAYS
        self._num_told: dict[Sequence, int] = {}
        self._turns: dict[str, int] = {}  # by share, the number of its last turn

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits."""
        return bool(self._num_told)

    @property
    def num_running(self) -> int:
        """The one whose turn it is."""
        return min(1, len(self._num_told))

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for the running one."""
        return len(self._num_told) - self.num_running

    @property
    def kv_blocks(self) -> KVBlocks:
        """None: the model keeps a cache of its own."""
        return KVBlocks(0, 0, 0)

    def add(self, sequences: list[Sequence]) -> None:
        """Lets `sequences` wait for their turn."""
        self.score(list(dict.fromkeys(sequence.prompt for sequence in sequences)))
        for sequence in sequences:
            sequence.is_kept = False
            self._num_told[sequence] = len(sequence.tokens)

    def score(self, prompts: list[Prompt]) -> None:
        """Sees to it that those of `prompts` which want scores have them, by the model's forward."""
        self.generator.own.score(prompts, self.generator.device)

    def cancel(self, sequences: list[Sequence]) -> None:
        """Takes `sequences` out; those that have finished stay as they are."""
        for sequence in sequences:
            self._num_told.pop(sequence, None)

    def take_out(self) -> list[Progress]:
        """Takes everything out; all that was drawn is handed on already."""
        self._num_told.clear()
        return []

    def stay(self) -> None:
        """Takes part in passes of other processes; where there is work here, its next pass does."""
        if self._passes is not None and not self.has_work:
            self._passes.meet(IDLE)

    def turn(self) -> list[Progress]:
        """More of the answer of the sequence that waits longest, of each share in turn."""
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
    """A batch of `generator`, which has no containers; the return of what it takes goes on `release`.

    Errors name `caller`.

    Raises:
        ValueError: processes share the model, or `longest` is out of range.
    """
    if generator.group.size > 1:
        raise ValueError(
            f"{caller}: {generator.fallback_reason}, and only models with containers serve {generator.group.size} "
            f"processes that share them; set {generator.group.remedy}"
        )
    positions = getattr(generator.module.config.get_text_config(), "max_position_embeddings", None)
    limit = min(generator.config.max_out_tokens, positions or generator.config.max_out_tokens)
    check_integer("longest", limit if longest is None else longest, 2, limit)
    generator.own.gather(release)
    passes = generator.own.joint_passes()
    return OwnBatch(generator, longest or limit, None if passes is None else release.enter_context(passes.joined()))
