"""How processes that hold a head's rows between them meet in `linear_log_prob`."""

import torch
import torch.distributed as dist

from hybrid_engine.distributed.host_groups import host_group
from hybrid_engine.ops.linear_log_prob import VocabularyShare


def vocabulary_share(group: dist.ProcessGroup, num_rows: int) -> VocabularyShare:
    """The share of this process: `num_rows` rows of the head, behind those of the earlier ranks of `group`. Collective.

    The processes of the group must give `linear_log_prob` the same hidden states and targets, at the same time.
    """
    world, rank = group.size(), group.rank()
    counts = [0] * world
    dist.all_gather_object(counts, num_rows, group=host_group(group))

    def gather(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    def add(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    return VocabularyShare(sum(counts[:rank]), gather, add)
