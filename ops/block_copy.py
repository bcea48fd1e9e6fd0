"""Copies of KV blocks inside the workspace, for forks' last partial blocks and for closing gaps.

Moves 2 * P * K * num_tokens * D elements per copy, all copies in one call. P tensors with blocks: the keys and the
values of each layer.
"""

import torch

from hybrid_engine.ops.dispatch import Launch, check_tensor, kernel_or_reference, prepared, tl, triton, use_triton

TILE = 1024  # elements of one program


@triton.jit
def block_copy_kernel(
    workspace_ptr,
    sources_ptr,
    targets_ptr,
    num_tokens_ptr,
    part_stride,
    block_stride,
    head_stride,
    head_dim,
    TILE: tl.constexpr,
):
    """One program copies a tile of one head of one block of one tensor."""
    copy = tl.program_id(0)
    part = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    source = tl.load(sources_ptr + copy)
    target = tl.load(targets_ptr + copy)
    size = tl.load(num_tokens_ptr + copy) * head_dim
    base = workspace_ptr + part * part_stride + head * head_stride
    for start in range(0, size.to(tl.int32), TILE):
        offsets = start + tl.arange(0, TILE)
        values = tl.load(base + source * block_stride + offsets, mask=offsets < size)
        tl.store(base + target * block_stride + offsets, values, mask=offsets < size)


class BlockCopyOp:
    """Callable `(workspace, sources, targets, num_tokens)`, in place."""

    def __call__(
        self, workspace: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, num_tokens: torch.Tensor
    ) -> None:
        """Copies the first `num_tokens[i]` places of block `sources[i]` to block `targets[i]`.

        `workspace [P, num_blocks, K, block_size, D]`, contiguous; the others `[M]` int64. No block is the target
        of one copy and part of another. Places of a target after the first `num_tokens` are unchanged.

        Raises ValueError for a workspace that is not contiguous, or numbers of another shape or device.
        """
        if use_triton(workspace):
            kernel_or_reference(self._launch, self.reference, workspace, sources, targets, num_tokens)
        else:
            self.reference(workspace, sources, targets, num_tokens)

    def _launch(
        self, workspace: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, num_tokens: torch.Tensor
    ) -> None:
        launch = prepared(_prepare, workspace, sources, targets, num_tokens)
        launch(workspace, sources, targets, num_tokens, *workspace.stride()[:3], workspace.shape[-1])

    def reference(
        self, workspace: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, num_tokens: torch.Tensor
    ) -> None:
        """The function of the kernel in plain torch, one copy at a time."""
        for source, target, count in torch.stack((sources, targets, num_tokens), 1).tolist():
            workspace[:, target, :, :count] = workspace[:, source, :, :count]


def _prepare(workspace: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, num_tokens: torch.Tensor) -> Launch:
    check_tensor("workspace", workspace, shape=(None,) * 5)
    if not workspace.is_contiguous():
        raise ValueError(f"workspace has strides {workspace.stride()}; expected a contiguous one")
    for name, numbers in (("sources", sources), ("targets", targets), ("num_tokens", num_tokens)):
        check_tensor(name, numbers, like=workspace, dtype=torch.int64, shape=(sources.shape[0],), is_dense_last=True)
    num_tensors, _, num_heads, _, _ = workspace.shape
    return Launch(block_copy_kernel, (sources.shape[0], num_heads, num_tensors), workspace.device, TILE=TILE)
