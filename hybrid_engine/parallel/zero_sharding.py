"""ZeRO over units by FSDP2, for all parameters but those without a dimension, which nothing divides."""

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from hybrid_engine.distributed.processes import default_device
from hybrid_engine.parallel.eager_module import EagerModule
from hybrid_engine.parallel.parallel_module import ParallelModule
from hybrid_engine.zero.layer_groups import find_groups
from hybrid_engine.zero.view_outputs import copy_views_in_outputs


def shard(part: ParallelModule) -> None:
    """Shards a part whose config says `use_zero`, once: gradients are summed as the backward pass makes them.

    They are never averaged. Layers of a module whose own forward runs are gathered and reduced one by one; a graph
    reads parameters at any time. Where each unit is a group of its own, nothing is shared out. Collective.
    """
    mesh = part.meshes.zero
    if not part.compute_config.use_zero or mesh is None or mesh.size(-1) == 1 or isinstance(part, FSDPModule):
        return
    scalars = {p for p in part.parameters() if not p.dim()}
    for scalar in scalars:
        scalar.data = scalar.data.to(default_device())  # as FSDP2 moves what it shards
    layers = find_groups(part).modules if isinstance(part, EagerModule) else []
    for group in (*layers, part):
        copy_views_in_outputs(group)
        sharded = fully_shard(group, mesh=mesh, reshard_after_forward=False, ignored_params=scalars)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def sharded_parameters(part: ParallelModule) -> list[nn.Parameter]:
    """The parameters of which this process has a part among units, and whose gradients FSDP2 sums."""
    return [p for p in part.parameters() if p.dim()] if isinstance(part, FSDPModule) else []
