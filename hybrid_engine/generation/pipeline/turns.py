"""Turns of micro-batches, the same in the same order on all stages.

An error of one stage ends them on all at the same turn: where the tokens of the turn that failed are to be read.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from hybrid_engine.distributed.verdict import LostError, Partners, attempt
from hybrid_engine.generation.pipeline.links import StageFailedError, StageLinks
from hybrid_engine.generation.pipeline.micro_batches import MicroBatch


class OrderedTurns:
    """Takes turns of micro-batches, of which at most `at_once` are under way.

    Args:
        dtype: of hidden states.
        peers: the processes of this stage.
    """

    def __init__(self, links: StageLinks, dtype: torch.dtype, at_once: int, peers: Partners):
        self.links, self.dtype, self.at_once, self.peers = links, dtype, at_once, peers
        self.failed: set[MicroBatch] = set()
        """Those of which this stage had an error in a turn; nothing must change them any more."""
        self._error: BaseException | None = None
        self._under_way: deque[MicroBatch] = deque()

    def read(self, batch: MicroBatch) -> None:
        """Reads the tokens of the last turn of `batch`, if it is under way, and of all turns before.

        Raises, on all stages, where one had an error in one of these: that error, or StageFailedError.
        """
        while batch in self._under_way:
            self.read_oldest()

    def read_oldest(self) -> None:
        """Reads the tokens of the first turn that is under way, if there is one."""
        if not self._under_way:
            return
        oldest = self._under_way.popleft()
        error = attempt(oldest.read_all)[1]
        if oldest in self.failed or isinstance(error, StageFailedError):
            self.links.finish()
            raise self._error or StageFailedError
        if error is not None:
            raise error

    def read_all(self) -> None:
        """Reads all turns that are under way, the oldest first; errors as of `read_oldest`."""
        while self._under_way:
            self.read_oldest()

    def take(self, batch: MicroBatch, begin: Callable[[], None] = lambda: None) -> None:
        """A turn of `batch`, whose tokens have been read; `begin` is called before it and raises alike on all or not.

        An error is kept for when the turn is read; LostError is raised: nothing can be told any more.
        """
        self.links.begin_turn(self.at_once)
        problem = attempt(begin)[1] or attempt(batch.turn)[1]
        if isinstance(problem, LostError):
            raise problem
        if problem is not None:
            if not self.links.has_agreed:  # the others of the last stage may have come as far as the draw
                problem = attempt(partial(self.peers.raise_together, problem))[1] or problem
            self.links.fail_turn(self.dtype)
            self.failed.add(batch)
            if not isinstance(problem, StageFailedError):
                self._error = self._error or problem
        self._under_way.append(batch)
