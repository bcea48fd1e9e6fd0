"""A live batch on processes that hold some of the layers each: micro-batches, which take turns in rotation.

While one is in one stage, the others are in the other stages. The tokens of a micro-batch are read, and told, before
its next turn.
"""

from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.generation.batching.sequence import Prompt, Sequence
from hybrid_engine.generation.live.batch import KVBlocks, LiveBatch, Progress
from hybrid_engine.generation.pipeline.micro_batches import MicroBatch
from hybrid_engine.generation.pipeline.turns import OrderedTurns
from hybrid_engine.generation.scoring import is_unscored, score_prompts


class StagedBatch(LiveBatch):
    """The micro-batches as one; every stage makes the same calls.

    Args:
        batches: of which `turns` are taken.
    """

    def __init__(self, model: InferenceModel, batches: list[MicroBatch], longest: int, turns: OrderedTurns):
        self.model, self.longest = model, longest
        self._turns = turns
        self._parts = [LiveBatch(model, batch, longest) for batch in batches]
        self._settled: list[Progress] = []  # and not told yet
        self._next = 0

    @property
    def has_work(self) -> bool:
        """Whether a turn would bring something, an error that was met included."""
        return bool(self._turns.failed or self._settled) or any(part.has_work for part in self._parts)

    @property
    def num_running(self) -> int:
        """Sequences that decode now."""
        return sum(part.num_running for part in self._parts)

    @property
    def num_waiting(self) -> int:
        """Sequences that have not begun, or begin again."""
        return sum(part.num_waiting for part in self._parts)

    @property
    def kv_blocks(self) -> KVBlocks:
        """What the KV blocks of all micro-batches on this stage are for; those of other stages are alike."""
        return KVBlocks(*map(sum, zip(*(part.kv_blocks for part in self._parts), strict=True)))

    @property
    def unfinished(self) -> list[Sequence]:
        """All sequences that something is still to come for."""
        return [sequence for part in self._parts for sequence in part.unfinished]

    def add(self, sequences: list[Sequence]) -> None:
        """LiveBatch's. Samples of a prompt go together, and what goes on from another sequence goes where that was."""
        self.score(list(dict.fromkeys(sequence.prompt for sequence in sequences)))
        of_prompts: dict[Prompt, list[Sequence]] = {}
        for sequence in sequences:
            of_prompts.setdefault(sequence.prompt, []).append(sequence)
        for samples in of_prompts.values():
            part = self._choose_part(samples)
            if part.strategy not in self._turns.failed:
                part.add(samples)

    def _choose_part(self, samples: list[Sequence]) -> LiveBatch:
        for sequence in samples:
            for part in self._parts:
                if sequence.begins_from in part.scheduler.kept.sequences:
                    return part
        return min(self._parts, key=lambda part: len(part.unfinished))

    def score(self, prompts: list[Prompt]) -> None:
        """LiveBatch's, by passes through all stages."""
        wanted = [prompt for prompt in prompts if is_unscored(prompt)]
        if wanted:
            self._settled += self.settle()  # a pass through all stages has messages of its own
            score_prompts(self.model, wanted)

    def cancel(self, sequences: list[Sequence]) -> None:
        """Takes `sequences` out of their micro-batches, whether they run or wait."""
        for part in self._parts:
            if part.strategy not in self._turns.failed:
                part.cancel(sequences)

    def take_out(self) -> list[Progress]:
        """Takes everything out of all micro-batches; returns what was drawn and not handed on yet."""
        self._turns.read_all()
        settled, self._settled = self._settled, []
        return settled + [told for part in self._parts for told in part.take_out()]

    def settle(self) -> list[Progress]:
        """Reads what the last stage has still to tell of earlier turns; what that brought."""
        self._turns.read_all()
        return [told for part in self._parts for told in part.tell()]

    def turn(self) -> list[Progress]:
        """A turn of the next micro-batch that has work; what was told since its last one."""
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
