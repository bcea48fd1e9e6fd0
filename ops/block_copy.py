"""Copies of KV blocks inside the workspace, for forks' last partial blocks and for closing gaps.

Moves 2 * 2 * L * K * num_tokens * D elements per copy, all copies and layers in one call.
"""

import torch


class BlockCopyOp:
    """Callable `(workspace, sources, targets, num_tokens)`, in place."""

    def __call__(
        self, workspace: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, num_tokens: torch.Tensor
    ) -> None:
        """The first `num_tokens[i]` places of block `sources[i]` go to block `targets[i]`.

        `workspace [L, 2, num_blocks, K, block_size, D]`; the others `[M]` int64. No block is the target of one
        copy and part of another. What stands behind the first `num_tokens` places of a target is not defined.
        """
        self.reference(workspace, sources, targets, num_tokens)

    def reference(
        self, workspace: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, num_tokens: torch.Tensor
    ) -> None:
        """The same in plain torch, one copy at a time."""
        for source, target, count in torch.stack((sources, targets, num_tokens), 1).tolist():
            workspace[:, :, target, :, :count] = workspace[:, :, source, :, :count]
