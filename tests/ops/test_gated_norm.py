"""The norm with a gate against transformers' own modules, and kernels against the reference."""

import shutil

import pytest
import torch
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from hybrid_engine.ops import GatedNormOp, cpu_kernels, dispatch


@pytest.fixture(params=["reference", "compiled", pytest.param("kernel", marks=pytest.mark.kernels)])
def way(request, monkeypatch):
    """Each form of the op; gives the names of compiled functions that were called."""
    torch.manual_seed(0)
    called, call = [], cpu_kernels.call
    if request.param == "kernel":
        request.getfixturevalue("on_kernels")
    elif request.param == "compiled":
        if shutil.which("cc") is None:
            pytest.skip("there is no C compiler cc")
        monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", "0")
        monkeypatch.setattr(dispatch, "HAS_TRITON", False)
        monkeypatch.setattr(cpu_kernels, "call", lambda name, *rest: (called.append(name), call(name, *rest)))
    yield
    assert called == ["gated_norm"] * len(called) and bool(called) == (request.param == "compiled")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gates_first", [False, True])
def test_it_equals_transformers_module(way, gates_first, dtype):
    groups, width, num_rows = 3, 111, 5
    norm = MambaRMSNormGated(width, 37, eps=1e-5) if gates_first else Qwen3NextRMSNormGated(37, eps=1e-5)
    torch.nn.init.normal_(norm.to(dtype).weight)
    op = GatedNormOp(37, 1e-5, gates_first)
    x, gate = torch.randn(num_rows, width).to(dtype), torch.randn(width, num_rows).to(dtype).t()  # by columns
    with torch.no_grad():
        expected = norm(x, gate) if gates_first else norm(*(y.unflatten(1, (groups, 37)) for y in (x, gate))).flatten(1)
        output = op(x, gate, norm.weight)
    assert output.dtype == dtype
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)


def test_groups_may_have_weights_of_their_own(way):
    x, gate, gamma = torch.randn(2, 4, 12), torch.randn(4, 12), torch.randn(12)
    for gates_first in (True, False):
        op = GatedNormOp(6, 1e-5, gates_first)
        whole = op(x[0], gate, gamma)
        halves = [op(x[0, :, part].contiguous(), gate[:, part], gamma[part]) for part in (slice(6), slice(6, None))]
        torch.testing.assert_close(whole, torch.cat(halves, 1), atol=1e-6, rtol=1e-6)


def test_bad_input_is_named():
    op = GatedNormOp(6, 1e-5)
    with pytest.raises(ValueError, match="the input is 10 wide; expected a multiple of the group of 6"):
        op(torch.zeros(1, 10), torch.zeros(1, 10), torch.zeros(6))
    with pytest.raises(ValueError, match=r"gamma has shape \[5\]; expected \[12\]"):
        op(torch.zeros(1, 12), torch.zeros(1, 12), torch.zeros(5))
    with pytest.raises(ValueError, match=r"gate has shape \[1, 6\]; expected \[1, 12\]"):
        op(torch.zeros(1, 12), torch.zeros(1, 6), torch.zeros(6))
