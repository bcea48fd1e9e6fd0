"""Collectives over one tensor by their names since torch 2.13, which warns of those that the releases before have."""

import torch.distributed as dist

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""(output `[W * n]`, input `[n]`, group): the parts of all W processes, one behind the other."""
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""(output `[n]`, input `[W * n]`, op, group): this process's part of the sum."""
