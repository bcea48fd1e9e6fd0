"""Ops that torch computes on a CPU in fp32, and of which it cannot say the shapes alone.

M rows, K and N widths, G experts, whose rows stand one behind the other.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class GroupedProducts(TorchDispatchMode):
    """Inside, products of experts have shapes in every precision; torch has them for bf16 alone.

    `[M, K] @ [G, K, N] -> [M, N]`; of a weight's gradient `[K, M] @ [M, N] -> [G, K, N]`.
    """

    lets_compiled_run = True
    """For `ops/cpu_kernels.py`, as of `LiveBytes`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        left, right, ends = args[:3]
        shape = (left.shape[0], right.shape[-1])
        return left.new_empty((len(ends), *shape) if right.dim() == 2 else shape)
