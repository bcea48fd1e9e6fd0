"""The block-copy kernel copies what it is asked to and nothing else."""

import pytest
import torch

from hybrid_engine.ops import BlockCopyOp

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size, head_dim", [(7, 4), (16, 80), (1, 1)])
def test_the_kernel_equals_the_reference_to_the_bit(block_size, head_dim, dtype, kernels):
    workspace = torch.randn(4, 9, 3, block_size, head_dim, device=kernels).to(dtype)
    expected = workspace.clone()
    numbers = torch.tensor([[8, 0, 5], [1, 2, 3], [1, block_size, (block_size + 1) // 2]], device=kernels)
    BlockCopyOp()(workspace, *numbers)
    BlockCopyOp().reference(expected, *numbers)
    assert torch.equal(workspace, expected)


def test_numbers_that_do_not_fit_are_named(kernels):
    workspace = torch.zeros(2, 4, 1, 2, 2, device=kernels)
    ones = torch.ones(2, dtype=torch.int64, device=kernels)
    with pytest.raises(ValueError, match=r"targets is .*int32; expected"):
        BlockCopyOp()(workspace, ones, ones.int(), ones)
    with pytest.raises(ValueError, match="workspace has strides"):
        BlockCopyOp()(workspace.transpose(0, 1), ones, ones, ones)
