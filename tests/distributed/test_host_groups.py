"""Verdicts and objects where a script's group takes no CPU tensors, as a plain nccl one; here gloo for "cuda"."""

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.distributed.groups import host_group
from hybrid_engine.distributed.processes import gather_objects, on_rank_zero
from hybrid_engine.distributed.verdict import Partners, everyone
from hybrid_engine.rlhf.batches.head_log_probs import vocabulary_share
from tests.support.distributed import run_distributed
from tests.support.one_rank import outcome


def fail_on(rank, who):
    if rank == who:
        raise ValueError("no")
    return rank


def meet(rank, world_size, folder):
    """What processes tell each other in each of two runs of one script, and in groups of two of its four."""
    found = []
    for number in range(2):
        dist.barrier(host_group())  # one that left would break the group for those who yet connect
        dist.destroy_process_group()
        dist.init_process_group("cuda:gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=world_size)
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(torch.ones(1))
        pairs, _ = dist.new_subgroups(2)
        pair = Partners(size=2, rank=rank % 2, group=pairs)
        of_pair = outcome(lambda pair=pair: pair.agree(lambda: fail_on(rank, 2)))  # the other pair hears of nothing
        of_all = outcome(lambda: everyone().agree(lambda: fail_on(rank, 1)))
        assert everyone().highest([rank, -rank]) == [world_size - 1, 0]
        assert host_group() is host_group(dist.group.WORLD) is not dist.group.WORLD
        assert host_group(host_group()) is host_group()
        share = vocabulary_share(pairs, 10 + rank).first
        found.append((of_pair, of_all, gather_objects(rank), on_rank_zero(lambda: f"from {rank}"), share))
    dist.barrier(host_group())
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/end", rank=rank, world_size=world_size)
    return found


def test_processes_of_a_plain_nccl_group_meet_over_gloo(tmp_path):
    by_rank = run_distributed(meet, 4, str(tmp_path))
    assert all(first == second for first, second in by_rank)
    of_pair, of_all, gathered, from_zero, shares = zip(*(first for first, _ in by_rank), strict=True)
    assert of_pair == (0, 1, ("ValueError", "no"), ("ValueError", "rank 2: no"))
    other = ("ValueError", "rank 1: no")
    assert of_all == (other, ("ValueError", "no"), other, other)
    assert gathered == ([0, 1, 2, 3],) * 4 and from_zero == ("from 0",) * 4
    assert shares == (0, 10, 0, 12)


def alone(rank, world_size):
    return host_group() is dist.group.WORLD


def test_a_group_that_takes_tensors_of_the_cpu_serves_itself():
    assert run_distributed(alone, 2) == [True, True]
