"""Copy of whole KV blocks inside the workspace, for a fork's last partial block and for closing gaps.

Moves 2 * 2 * L * K * num_tokens * D elements per pair, all layers in one call.
"""

import torch


class BlockCopyOp:
    """Callable `(workspace, source, target, num_tokens)`, in place."""

    def __call__(self, workspace: torch.Tensor, source: int, target: int, num_tokens: int) -> None:
        """`workspace [L, 2, num_blocks, K, block_size, D]`: the first `num_tokens` of block `source` to `target`."""
        workspace[:, :, target, :, :num_tokens] = workspace[:, :, source, :, :num_tokens]
