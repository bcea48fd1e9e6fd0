"""One live batch on all processes that share its model: one leads, the others follow."""

from collections.abc import Callable

from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.generation.batching.sequence import Sequence
from hybrid_engine.generation.batching.strategy import TextGeneration
from hybrid_engine.generation.live import LiveBatch, Progress
from hybrid_engine.generation.live_link import LiveLink


class LeadingBatch(LiveBatch):
    """The batch of a process that leads others: they make each call that is made here."""

    seconds_between_stays = 0.5

    def __init__(self, model: InferenceModel, strategy: TextGeneration, longest: int, link: LiveLink):
        super().__init__(model, strategy, longest)
        self.link, self.is_needed = link, True
        """Whether a follower's caller still had a use for this batch when they were asked last."""

    def add(self, sequences: list[Sequence]) -> None:
        """LiveBatch's, on all processes."""
        if sequences:
            self.link.send_call("add", sequences)
        super().add(sequences)

    def cancel(self, sequences: list[Sequence]) -> None:
        """LiveBatch's, on all processes."""
        known = [sequence for sequence in sequences if sequence in self._num_told]
        if known:
            self.link.send_call("cancel", known)
        super().cancel(known)

    def take_out(self) -> list[Progress]:
        """LiveBatch's, on all processes."""
        self.link.send_call("take_out")
        return super().take_out()

    def turn(self) -> list[Progress]:
        """LiveBatch's, on all processes."""
        self.link.send_call("turn")
        return super().turn()

    def stay(self) -> None:
        """Shows the followers that the leader is there, and asks whether they still have a use for it."""
        self.link.send_call("stay")
        self.is_needed = self.link.any_of(False)


def follow(batch: LiveBatch, link: LiveLink, is_staying: Callable[[], bool]) -> None:
    """Makes the leader's calls on this process's batch until the leader says that it ends.

    `is_staying` says whether the caller of this process still has a use for the leader.
    """
    while True:
        name, sequences = link.receive_call()
        if name == "end":
            return
        if name == "fail":
            raise RuntimeError(f"rank {link.leader}, which is asked, stopped at an error")
        if name == "add":
            batch.add(sequences)
        elif name == "cancel":
            batch.cancel(sequences)
        elif name == "take_out":
            batch.take_out()
        elif name == "turn":
            batch.turn()
        else:
            assert name == "stay", name
            link.any_of(is_staying())
