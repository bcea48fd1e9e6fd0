"""Bytes of storages that ops create: while they are alive, and of storages that grow and shrink."""

import torch
from torch import nn

from hybrid_engine.metrics.memory import LiveBytes


def test_live_bytes_are_those_of_storages_that_ops_made_and_still_are():
    given = torch.zeros(1000)
    with LiveBytes() as live:
        kept = given + 1
        view = kept[10:]
        del kept
        assert live.num_bytes == 4000
        for _ in range(3):
            nn.functional.relu(view)
        given.add_(1)
        del view
    assert (live.num_bytes, live.peak_bytes) == (0, 4000 + 4 * 990)


def test_live_bytes_follow_storages_that_grow_and_shrink():
    gathered = torch.empty(0)
    with LiveBytes([gathered.untyped_storage()]) as live:
        gathered.untyped_storage().resize_(4096)
        torch.zeros(1)
        gathered.untyped_storage().resize_(0)
        torch.zeros(1)
    assert live.peak_bytes == 4096 + 4
