"""ZeRO over units by FSDP2, for all parameters with at least one dimension, with hooks around its reductions.

`build_optimizer` calls this.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from hybrid_engine.distributed.groups import reduce_scatter_single
from hybrid_engine.distributed.processes import default_device
from hybrid_engine.extensions.parallelize.module.eager_module import EagerModule
from hybrid_engine.extensions.parallelize.module.parallel_module import ParallelModule
from hybrid_engine.extensions.parallelize.module.reducer import Bucket
from hybrid_engine.zero.fsdp2_private import reduce_without_empty
from hybrid_engine.zero.wrapping import copy_views_in_outputs, find_groups


def shard(part: ParallelModule) -> None:
    """Shards a part whose config has `use_zero`, once. The backward pass then sums gradients as it makes them.

    Gradients are never averaged. If the module's own forward runs, its layers are gathered and reduced one by one; a
    graph can read parameters at any time, so that it is one FSDP unit. If each unit is its own group, nothing is
    sharded. Collective.
    """
    mesh = part.meshes.zero
    if not part.compute_config.use_zero or mesh is None or mesh.size(-1) == 1 or isinstance(part, FSDPModule):
        return
    scalars = {p for p in part.parameters() if not p.dim()}
    for scalar in scalars:
        scalar.data = scalar.data.to(default_device())  # as FSDP2 moves what it shards
    layers = find_groups(part).modules if isinstance(part, EagerModule) else []
    groups = [*layers, part]
    for group in groups:
        copy_views_in_outputs(group)
        sharded = fully_shard(group, mesh=mesh, reshard_after_forward=False, ignored_params=scalars)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    reduce_without_empty(groups)


def sharded_parameters(part: ParallelModule) -> list[nn.Parameter]:
    """The parameters that are sharded over units, whose gradients FSDP2 sums."""
    return [p for p in part.parameters() if p.dim()] if isinstance(part, FSDPModule) else []


class ZeroBucket(Bucket):
    """The parameters that FSDP2 reduces together, and the collective that it uses, with hooks around it.

    FSDP2 passes gradients in the order of the collective: first the part for the first process of a group, then the
    part for the second, with zeros if a parameter does not divide evenly. It receives the part of the sum that this
    process keeps.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, has_groups: bool):
        """`has_groups`: sums of several groups of units are added up afterwards, and are not final before."""
        super().__init__(parameters, group)
        self.has_groups = has_groups

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates the memory that FSDP2 requests before the collective."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Runs the reduce-scatter for FSDP2, on its stream."""
        self.run_hooks(self.pre_hooks, input_tensor)
        work = reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        if work is not None:
            work.wait()
        if not self.has_groups:
            self.after(output_tensor)
        return work

    def after(self, gradients: Tensor) -> None:
        """Calls the post-hooks with `gradients`, the part of the sum over all units that this process keeps."""
        self.run_hooks(self.post_hooks, gradients)


def zero_buckets(part: ParallelModule) -> list[ZeroBucket]:
    """The buckets that FSDP2 reduces for a part, layers first, without hooks; they replace earlier ones."""
    if not isinstance(part, FSDPModule):
        return []
    assert part.meshes.data is not None and part.meshes.zero is not None
    group, has_groups = part.meshes.data.get_group(), part.meshes.zero.ndim > 1
    left = {p for p in sharded_parameters(part) if p.requires_grad}
    found = []
    for module in reversed([module for module in part.modules() if isinstance(module, FSDPModule)]):
        own = [p for p in module.parameters() if p in left]
        left -= set(own)
        bucket = ZeroBucket(own, group, has_groups)
        module.set_custom_reduce_scatter(bucket)
        if has_groups:
            module.set_all_reduce_hook(bucket.after)
        found.append(bucket)
    return found
