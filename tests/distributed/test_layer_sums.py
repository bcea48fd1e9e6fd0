"""Groups that serve the sums inside of layers alone, made anew after each error."""

import time

import torch.distributed as dist

from hybrid_engine.generation.model import groups
from hybrid_engine.generation.model.groups import LayerSums
from tests.support.distributed import run_distributed


def make_slowly(rank, world_size):
    """Whether the other processes had their groups when this one went on; the last takes its time."""
    store = dist.distributed_c10d._get_default_store()
    make = dist.new_subgroups_by_enumeration

    class SlowDist:
        def __getattr__(self, name):
            return getattr(dist, name)

        def new_subgroups_by_enumeration(self, ranks):
            made = make(ranks)
            time.sleep(1.0 if rank == world_size - 1 else 0.0)
            store.add("made", 1)
            return made

    groups.dist = SlowDist()
    sums = LayerSums([list(range(world_size))])
    seen = [store.add("made", 0) == world_size]
    sums.renew()
    return [*seen, store.add("made", 0) == 2 * world_size]


def test_no_process_goes_on_before_all_have_their_groups():
    """It could stop and leave its group at once; one that yet connects would make none, and count others from then."""
    assert run_distributed(make_slowly, 2) == [[True, True]] * 2
