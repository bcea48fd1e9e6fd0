"""A live batch over layers that are gathered one by one: every process gathers each layer for all of them.

Each process has requests of its own. Before a turn they say whether one of them has work; then all pass over the
layers, those without work computing nothing. They meet like that as long as one of them serves.
"""

from contextlib import AbstractContextManager

from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.distributed.verdict import Partners
from hybrid_engine.generation.backend import ContainerRollouts
from hybrid_engine.generation.batching.strategy import TextGeneration
from hybrid_engine.generation.joint_turns import IDLE, STREAMED_STAYS, WORKS, JointTurns
from hybrid_engine.generation.live.batch import LiveBatch, Progress
from hybrid_engine.ops.kernel_errors import naming_kernels


class StreamedBatch(LiveBatch):
    """LiveBatch, whose turns are those of all processes.

    Args:
        native: runs a turn over the stream.
        partners: whose layers are gathered with these.
    """

    seconds_between_stays = STREAMED_STAYS

    def __init__(
        self,
        model: InferenceModel,
        strategy: TextGeneration,
        longest: int,
        native: ContainerRollouts,
        partners: Partners,
    ):
        super().__init__(model, strategy, longest)
        self._turns = JointTurns(partners, lambda: native.pass_over_stream(self._pass))

    def turn(self) -> list[Progress]:
        """One pass over the layers, on all processes."""
        self._turns.meet(WORKS)
        return self.tell()

    def stay(self) -> None:
        """Takes part in the turns of others; where there is work here, its next turn does."""
        if not self.has_work:
            self._turns.meet(IDLE)

    def leaving(self) -> AbstractContextManager[None]:
        """Takes part in the turns of others afterwards until all have left; an error inside is raised on all."""
        return self._turns.leaving()

    def _pass(self) -> None:
        """One pass over the layers, whether there is something to compute or not."""
        with naming_kernels():
            if not self._scoring.turn():
                self._join_scored()
                self.strategy.turn()
