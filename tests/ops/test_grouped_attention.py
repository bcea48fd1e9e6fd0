"""Attention with shared key and value heads: torch's numbers, in the form that CUDA's fused kernels take."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hybrid_engine.ops.softmax_context import attend_grouped
from hybrid_engine.rlhf.batches.packing import attend_along_spans


class CalledError(Exception):
    """Ends what would go on with a tensor that is on no device."""


class Recorded(TorchFunctionMode):
    """Heads of keys, and whether torch is asked to share them, of each call, which raises CalledError if it `ends`."""

    def __init__(self, ends=False):
        super().__init__()
        self.calls, self.ends = [], ends

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            self.calls.append((args[1].shape[1], kwargs["enable_gqa"]))
            if self.ends:
                raise CalledError
        return function(*args, **(kwargs or {}))


def heads(dtype, device="cpu", keys=9):
    torch.manual_seed(0)
    shapes = (2, 6, 9, 16), (2, 2, keys, 16), (2, 2, keys, 16)
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


MASK = torch.rand(9, 9, generator=torch.Generator().manual_seed(1)) < 0.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
def test_on_a_cpu_it_is_torchs_own_to_the_bit(dtype, masked):
    mask = MASK if masked else None
    q, k, v = heads(dtype)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked, scale=0.3, enable_gqa=True)
    assert torch.equal(attend_grouped(q, k, v, mask, is_causal=not masked, scale=0.3), expected)


@pytest.mark.parametrize(
    ("dtype", "masked", "key_heads"),
    [
        (torch.bfloat16, False, 2),  # flash attention takes them as they are
        (torch.bfloat16, True, 6),
        (torch.float32, False, 6),
        (torch.float32, True, 6),
    ],
)
def test_on_cuda_heads_are_repeated_where_no_fused_kernel_shares_them(dtype, masked, key_heads):
    with FakeTensorMode(allow_non_fake_inputs=True), Recorded() as recorded:
        mask = torch.ones(9, 9, dtype=torch.bool, device="cuda") if masked else None
        context = attend_grouped(*heads(dtype, "cuda"), mask, is_causal=not masked)
        assert context.shape == (2, 6, 9, 16) and context.is_cuda
    assert recorded.calls == [(key_heads, key_heads == 2)]


def test_repeated_heads_have_the_numbers_and_gradients_of_shared_ones():
    """The form of CUDA, computed on a CPU."""
    found = []
    for repeats in (False, True):
        q, k, v = (x.requires_grad_() for x in heads(torch.float64))
        if repeats:
            context = attend_grouped(q, *(x.repeat_interleave(3, 1) for x in (k, v)), MASK)
        else:
            context = attend_grouped(q, k, v, MASK)
        found.append([context, *torch.autograd.grad(context.square().sum(), (q, k, v))])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("dtype", "key_heads"), [(torch.float32, 6), (torch.bfloat16, 2)])
def test_padded_passes_of_recipes_take_a_fused_kernel_too(dtype, key_heads):
    """transformers' own function asks torch to share heads wherever there is no mask, in fp32 too."""
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    recorded = Recorded(ends=True)
    with FakeTensorMode(), recorded, pytest.raises(CalledError):
        attend_along_spans(module, *heads(dtype, "cuda"), None)
    assert recorded.calls == [(key_heads, True)]


def test_padded_passes_keep_their_bits_on_a_cpu():
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    found, expected = (f(module, *heads(torch.float32), None)[0] for f in (attend_along_spans, sdpa_attention_forward))
    assert torch.equal(found, expected)
