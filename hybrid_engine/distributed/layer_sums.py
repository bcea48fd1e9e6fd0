"""A group of processes that add up their parts inside of layers, of which one that stops ends the others' waiting.

Between two verdicts the processes that share a model meet in hundreds of sums. One that raises an error in the middle
never comes to the next, and the others would wait for it until the time limit. So it closes its connections in this
group, which serves nothing else: their sums fail at once, and in the verdict that follows all hear of its error. Then
the group is made anew.

Closing ends what others wait for on gloo. Sums of NCCL run on the device, which hears nothing of it: there the lines of
`presence.py` name the process, and the wait ends at the time limit.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from hybrid_engine.distributed.presence import LOST
from hybrid_engine.distributed.single_tensors import all_gather_single
from hybrid_engine.distributed.verdict import FollowedError, everyone


class Recordings(Protocol):
    """Recorded steps, whose graphs may hold collectives of a group."""

    def drop(self) -> None:
        """Forgets every graph."""


class LayerSums:
    """The collectives of this process's group.

    Args:
        ranks: those of every group, which all processes of the run make together.
    """

    def __init__(self, ranks: list[list[int]]):
        self._ranks = ranks
        self._group: dist.ProcessGroup | None = None
        self._recordings: WeakSet[Recordings] = WeakSet()
        self.renew()

    def drop_before_leaving(self, recordings: "Recordings") -> None:
        """Has `recordings` dropped before the group goes: NCCL's must not outlive their communicator."""
        self._recordings.add(recordings)

    def renew(self) -> None:
        """Makes the groups, anew where there were some; collective over all processes of the run.

        All have theirs when it returns: one that went on and left it again would break it for those who yet connect.
        """
        self._leave()
        self._group = everyone().agree(lambda: dist.new_subgroups_by_enumeration(self._ranks)[0])

    def _leave(self) -> None:
        """Closes this process's connections; the last reference to the group must go with it."""
        if self._group is not None:
            for recordings in list(self._recordings):
                recordings.drop()
            dist.destroy_process_group(self._group)
            self._group = None

    @contextmanager
    def ending_others(self) -> Iterator[None]:
        """Inside, an error of this process ends the sums that the others wait in; then `renew` is due on all.

        Locals of the frames that raised the error are cleared: one might hold the group.
        """
        try:
            yield
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            self._leave()
            raise

    @contextmanager
    def _noting_who_left(self) -> Iterator[dist.ProcessGroup]:
        if self._group is None:
            raise FollowedError("an error has parted the processes that share this model; start them again")
        try:
            yield self._group
        except RuntimeError as error:
            if any(words in str(error) for words in LOST):
                raise FollowedError(str(error)) from error
            raise

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the group; may overwrite `tensor`. FollowedError where another process left."""
        tensor = tensor.contiguous()
        with self._noting_who_left() as group:
            dist.all_reduce(tensor, group=group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of the group's processes side by side along the last dimension; errors as `all_reduce`."""
        with self._noting_who_left() as group:
            size = dist.get_world_size(group)
            gathered = tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:])
            all_gather_single(gathered, tensor.contiguous(), group=group)
        return torch.cat(gathered.chunk(size), -1)
