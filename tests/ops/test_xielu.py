"""xIELU: the reference against transformers' module in fp64, the kernel against the reference."""

import pytest
import torch
from transformers.activations import XIELUActivation

from hybrid_engine.ops.xielu import XIELUOp

SIZES = ((1, 1), (3, 63), (2, 1500))


def inputs(num_rows, width, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(num_rows, width) * torch.logspace(-7, 1, width)  # values near 0 too
    return x.to(dtype), torch.tensor([0.7]).to(dtype), torch.tensor([-1.3]).to(dtype)


def test_the_reference_is_transformers_module():
    x, alpha_p, alpha_n = inputs(3, 63, torch.float64)
    module = XIELUActivation(dtype=torch.float64)
    with torch.no_grad():
        module.alpha_p.copy_(alpha_p)
        module.alpha_n.copy_(alpha_n)
        expected = module._xielu_python(x)
    torch.testing.assert_close(XIELUOp()(x, alpha_p, alpha_n), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_the_reference(kernels, size, dtype):
    x, alpha_p, alpha_n = (tensor.to(kernels) for tensor in inputs(*size, dtype))
    wide = torch.zeros(size[0], size[1] + 5, dtype=dtype, device=kernels)
    wide[:, : size[1]] = x
    op = XIELUOp()
    exact = op.reference(x.double(), alpha_p.double(), alpha_n.double())
    bound = 1e-6 if dtype == torch.float32 else 2**-7  # the interpreter truncates to 16 bits
    torch.testing.assert_close(op(wide[:, : size[1]], alpha_p, alpha_n).double(), exact, rtol=bound, atol=2e-7)


def test_tensors_of_another_shape_are_refused():
    x, alpha_p, alpha_n = inputs(2, 3)
    with pytest.raises(ValueError, match="alpha_n"):
        XIELUOp()(x, alpha_p, alpha_n.expand(2))
