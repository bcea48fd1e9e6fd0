"""One live batch on all processes that share its model: one leads, the others follow."""

from collections.abc import Callable

from hybrid_engine.distributed.verdict import FollowedError, LostError, attempt
from hybrid_engine.generation.batching.sequence import Sequence
from hybrid_engine.generation.live.batch import KVBlocks, LiveBatch, Progress
from hybrid_engine.generation.live.link import Call, LiveLink

_LEAVES, _STAYS, _FAILED = range(3)


class LeadingBatch(LiveBatch):
    """`batch`, of a process that leads others: they make each call that is made here."""

    seconds_between_stays = 0.5

    def __init__(self, batch: LiveBatch, link: LiveLink):
        self._batch, self.longest = batch, batch.longest
        self.link, self.is_needed = link, True
        """Whether a follower's caller still had a use for this batch when they were asked last."""

    @property
    def has_work(self) -> bool:
        """Whether a turn would bring something."""
        return self._batch.has_work

    @property
    def num_running(self) -> int:
        """Sequences that decode now."""
        return self._batch.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that have not begun, or begin again."""
        return self._batch.num_waiting

    @property
    def kv_blocks(self) -> KVBlocks:
        """What the KV blocks of this process are for; those of the others are alike."""
        return self._batch.kv_blocks

    @property
    def unfinished(self) -> list[Sequence]:
        """All sequences that something is still to come for."""
        return self._batch.unfinished

    def add(self, sequences: list[Sequence]) -> None:
        """Lets `sequences` wait for a place, on all processes. See `LiveBatch.add`."""
        if sequences:
            self.link.send_call("add", sequences)
            with self.link.making_call():
                self._batch.add(sequences)

    def cancel(self, sequences: list[Sequence]) -> None:
        """Takes out, on all processes, those of `sequences` that have not finished."""
        unfinished = set(self.unfinished) if sequences else set()
        known = [sequence for sequence in sequences if sequence in unfinished]
        if known:
            self.link.send_call("cancel", known)
            self._batch.cancel(known)

    def take_out(self) -> list[Progress]:
        """Takes everything out on all processes; returns what was drawn and not handed on yet."""
        self.link.send_call("take_out")
        with self.link.making_call():
            return self._batch.take_out()

    def turn(self) -> list[Progress]:
        """One pass over the layers on all processes; what it brought."""
        self.link.send_call("turn")
        with self.link.making_call():
            return self._batch.turn()

    def stay(self) -> None:
        """Shows the followers that the leader is there, and asks whether they still have a use for it."""
        self.link.send_call("stay")
        state = self.link.highest(_LEAVES)
        if state == _FAILED:
            raise FollowedError("a process that follows stopped at an error")
        self.is_needed = state == _STAYS


def follow(batch: LiveBatch, link: LiveLink, is_staying: Callable[[], bool]) -> None:
    """Makes the leader's calls on this process's batch until the leader says that it ends.

    `is_staying` says whether the caller of this process still has a use for the leader. After an error here no call is
    made any more, until the leader has noticed. Raises it, or that of another process.
    """
    error: BaseException | None = None
    while True:
        call = link.receive_call()
        if call.name == "end":
            link.part(error)
            return
        if call.name == "stay":
            link.highest(_FAILED if error is not None else _STAYS if is_staying() else _LEAVES)
        elif error is None:
            error = attempt(lambda call=call: _make(call, batch, link))[1]  # type: ignore[misc]
            if isinstance(error, LostError):
                raise error


def _make(call: Call, batch: LiveBatch, link: LiveLink) -> None:
    with link.making_call():
        if call.name == "add":
            batch.add(call.sequences)
        elif call.name == "cancel":
            batch.cancel(call.sequences)
        elif call.name == "take_out":
            batch.take_out()
        else:
            assert call.name == "turn", call.name
            batch.turn()
