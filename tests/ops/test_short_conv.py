"""The short convolution against torch's own on whole sequences, however these are cut into chunks and steps."""

import shutil

import pytest
import torch
import torch.nn.functional as F

from hybrid_engine.ops import MixedBatch, cpu_kernels, dispatch
from hybrid_engine.ops.short_conv import ShortConvOp, conv_state_shape
from tests.support.batches import decode_of, feed, prefill_of

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler cc")


def exact(sequence, weight, bias, activation):
    """torch's convolution of one whole sequence `[n, C]`, in fp64."""
    padded = F.pad(sequence.double().t(), (weight.shape[1] - 1, 0))
    output = F.conv1d(padded, weight.double()[:, None], None if bias is None else bias.double(), groups=len(weight)).t()
    return F.silu(output) if activation == "silu" else output


@pytest.mark.parametrize(
    ("channels", "width", "activation", "has_bias"), [(1, 4, None, True), (150, 3, "silu", False), (37, 1, None, False)]
)
def test_pieces_of_sequences_equal_torchs_convolution_of_whole_ones(way, channels, width, activation, has_bias):
    op, weight, bias = ShortConvOp(activation), torch.randn(channels, width), torch.randn(channels)
    bias = bias if has_bias else None
    sequences = [torch.randn(length, channels) for length in (35, 2, 5)]
    states = torch.full((6, *conv_state_shape(channels, width)), torch.nan)
    for outputs in feed(sequences, lambda x, batch: op(x, weight, bias, states, batch)):
        for output, sequence in zip(outputs, sequences, strict=True):
            expected = exact(sequence, weight, bias, activation)
            torch.testing.assert_close(output.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_bits_are_the_same_however_sequences_are_cut(compiled, dtype):
    torch.manual_seed(0)
    op, weight, bias = ShortConvOp("silu"), torch.randn(150, 4).to(dtype), torch.randn(150).to(dtype)
    states, kept = torch.zeros(6, *conv_state_shape(150, 4)).to(dtype), []
    sequences = [torch.randn(length, 150).to(dtype) for length in (30, 2, 5)]
    for outputs in feed(sequences, lambda x, batch: op(x, weight, bias, states, batch)):
        kept.append([*outputs, states[[4, 1, 3]]])
    for cut in kept[1:]:
        assert all(map(torch.equal, cut, kept[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_writes_its_rows_slots_and_no_others(way, dtype):
    op, weight = ShortConvOp("silu"), torch.randn(50, 4).to(dtype)
    states, input = torch.randn(5, 3, 50).to(dtype), torch.randn(50, 3).to(dtype).t()  # by columns
    before, slots = states.clone(), torch.tensor([4, 0, 2])
    output = op(input, weight, None, states, decode_of([7, 9, 1], slots))
    assert torch.equal(states[slots], torch.cat((before[slots, 1:], input[:, None]), 1))
    assert torch.equal(states[[1, 3]], before[[1, 3]])
    whole = torch.cat((before[slots], input[:, None]), 1)
    expected = torch.stack([exact(sequence, weight, None, "silu")[-1] for sequence in whole])
    assert output.dtype == dtype
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)


def test_padding_after_a_prefill_gives_zeros_and_changes_no_state(way):
    op, weight, states = ShortConvOp(), torch.randn(8, 4), torch.zeros(2, 3, 8)
    batch = prefill_of([(0, 3), (0, 2)], torch.tensor([0, 1]))
    input = torch.randn(9, 8)
    padded = op(input, weight, None, states, batch)
    again, kept = torch.zeros_like(states), states.clone()
    assert torch.equal(padded[:5], op(input[:5], weight, None, again, batch))
    assert torch.equal(again, kept) and not padded[5:].any()
    mixed = MixedBatch(decode=decode_of([3], torch.tensor([0])), prefill=prefill_of([(0, 2)], torch.tensor([1])))
    assert op(input, weight, None, states, mixed).shape == input.shape


@needs_compiler
def test_the_compiled_function_runs_where_it_can(monkeypatch):
    monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", "0")
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    called, call = [], cpu_kernels.call
    monkeypatch.setattr(cpu_kernels, "call", lambda name, *rest: (called.append(name), call(name, *rest)))
    op, states = ShortConvOp("silu"), torch.zeros(2, 3, 8)
    op(torch.randn(2, 8), torch.randn(8, 4), None, states, decode_of([1, 1], torch.tensor([1, 0])))
    assert called == ["short_conv"]
    with pytest.raises(ValueError, match="its slot does not exist"):
        op(torch.randn(1, 8), torch.randn(8, 4), None, states, decode_of([1], torch.tensor([2])))


def test_bad_input_is_named(way):
    op, states, batch = ShortConvOp(), torch.zeros(2, 3, 8), decode_of([1], torch.tensor([0]))
    with pytest.raises(ValueError, match=r"states has shape \[2, 3, 8\]; expected \[any, 2, 8\]"):
        op(torch.randn(1, 8), torch.randn(8, 3), None, states, batch)
    with pytest.raises(ValueError, match=r"input has shape \[1, 7\]; expected \[any, 8\]"):
        op(torch.randn(1, 7), torch.randn(8, 4), None, states, batch)
    with pytest.raises(ValueError, match="the DecodeBatch names no state slots"):
        op(torch.randn(1, 8), torch.randn(8, 4), None, states, decode_of([1], None))
