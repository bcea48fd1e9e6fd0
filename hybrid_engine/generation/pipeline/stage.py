"""Which of a model's layers a process holds, and who holds the others.

Stages are consecutive layers; with tensor parallelism besides, the processes of one stage are consecutive ranks, as in
Megatron-LM: rank = stage * tp_size + place in the stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Stage:
    """This process's stage."""

    index: int
    """From 0, which has the embedding; the last has the final norm and the LM head."""
    ranks: tuple[int, ...]
    """The rank of each stage's process that this one passes hidden states to and takes them from, its own included."""
    group: dist.ProcessGroup
    """The process group of these."""
    host_group: dist.ProcessGroup
    """Another one of the same processes, over gloo: what the host reads does not wait for the device."""
    bounds: tuple[range, ...] | None = None
    """The layers of each stage; None: as equal as they can be."""

    @property
    def size(self) -> int:
        """How many stages there are."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage makes logits."""
        return self.index == self.size - 1

    def layers(self, num_layers: int) -> range:
        """The layers that this stage holds."""
        return self.all_layers(num_layers)[self.index]

    def all_layers(self, num_layers: int) -> Sequence[range]:
        """The layers of each stage."""
        return self.bounds or split_layers(num_layers, self.size)


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each stage; the first ones have one more where they cannot be equal: the last has the LM head."""
    fewest, num_longer = divmod(num_layers, num_stages)
    starts = [stage * fewest + min(stage, num_longer) for stage in range(num_stages + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
