"""The compiled CPU functions against their torch references, and what happens where they cannot be compiled or kept."""

import ctypes
import mmap
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hybrid_engine
from hybrid_engine.generation.core import Prefill, Prompt
from hybrid_engine.generation.step import pack_prefills
from hybrid_engine.metrics.memory import LiveBytes
from hybrid_engine.ops import (
    QKV,
    DecodeBatch,
    HeadWeights,
    KVBlocks,
    SoftmaxContextOp,
    cpu_kernels,
    cpu_library,
    dispatch,
)
from hybrid_engine.ops.cpu_kernels import linears_transposed
from hybrid_engine.ops.linear_log_prob import linear_log_prob
from hybrid_engine.ops.linears import ACTIVATIONS, activate_and_multiply
from hybrid_engine.ops.norm import NORM_OPS
from hybrid_engine.ops.softmax_context import rotary_table
from tests.support.models import PAD, build_model, module_logprobs, padded_prompts

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler cc")
DTYPES = (torch.float32, torch.bfloat16)
# Of the largest value: fp32's own rounding, and one unit in the last place of bf16.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2**-7}


@pytest.fixture
def compiled(monkeypatch):
    """Ops run their compiled functions; gives the names of those that were called."""
    monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", "0")
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    assert cpu_library.load_library() is not None
    called = []
    call = cpu_kernels.call
    for module in (cpu_kernels,):
        monkeypatch.setattr(module, "call", lambda name, *rest: (called.append(name), call(name, *rest)))
    torch.manual_seed(0)
    return called


@pytest.fixture(params=[1, 2])
def threads(request, monkeypatch):
    """One thread, and two for any number of values."""
    before = torch.get_num_threads()
    monkeypatch.setattr(cpu_kernels, "VALUES_OF_A_THREAD", 1)
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_near(actual, expected, dtype):
    assert actual.dtype == dtype and actual.shape == expected.shape
    expected = expected.double()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def by_columns(tensor):
    return tensor.t().contiguous().t()


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", cpu_kernels.NORMS)
def test_norms_equal_their_reference(compiled, threads, kind, dtype):
    op = NORM_OPS[kind](1e-5)
    for shape in ((1, 1), (3, 100), (33, 63), (5, 2, 16)):
        input, residual = torch.randn(2, *shape).to(dtype)
        gamma, beta = torch.randn(2, shape[-1]).to(dtype)
        beta = beta if kind == "layer" else None
        for layout in (torch.clone, by_columns) if len(shape) == 2 else (torch.clone,):
            assert_near(op(layout(input), gamma, beta), op.reference(input, gamma, beta), dtype)
            for added in (residual, layout(residual)):
                normed, total = op.add_and_norm(layout(input), added, gamma, beta)
                assert torch.equal(total, input + residual)
                assert_near(normed, op.reference(input + residual, gamma, beta), dtype)
    assert set(compiled) == {"norm"}


def build_linears(width_in, *widths, has_bias=True):
    """Weights as a model has them, one a slice of a larger tensor, with biases."""
    weights = [torch.randn(width, width_in).t() for width in widths]
    weights[0] = torch.randn(widths[0], width_in + 3)[:, 1:-2].t()
    return [(weight, torch.randn(weight.shape[1]) if has_bias else None) for weight in weights]


def exact_product(x, weight, bias):
    return x.double() @ weight.double() + (0 if bias is None else bias.double())


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "is_intel"), [*((rows, False) for rows in (2, 15, 16, 17, 32, 33, 100)), (1, True), (3, True), (8, True)]
)
@pytest.mark.parametrize("width_in", [1, 3, 63, 256])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_equal_exact_ones(compiled, threads, monkeypatch, rows, width_in, has_bias, is_intel):
    monkeypatch.setattr(cpu_kernels, "THREAD_ELEMENTS", 1)
    monkeypatch.setattr(cpu_kernels, "is_intel", lambda: is_intel)
    linears = build_linears(width_in, 5, 12, 100, has_bias=has_bias)
    for layout in (torch.clone, by_columns, lambda x: x.repeat(1, 2)[:, : x.shape[1]]):
        x, residual = layout(torch.randn(rows, width_in)), layout(torch.randn(rows, 100))
        assert cpu_kernels.can_multiply(x, linears, residual)
        whole = [cpu_kernels.widened_product(x, linear) for linear in linears]
        for outputs in (cpu_kernels.products(x, linears), whole):
            for output, linear in zip(outputs, linears, strict=True):
                assert_near(output, exact_product(x, *linear).float(), torch.float32)
        assert all(output.is_contiguous() for output in whole)
        (output,) = cpu_kernels.products(x, linears[-1:], residual)
        assert_near(output, (exact_product(x, *linears[-1]) + residual).float(), torch.float32)


KINDS = {
    "widened": cpu_kernels.Processor(True, False, True, False),
    "pairs": cpu_kernels.Processor(False, False, True, True),
}


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    """Each way to read bf16 weights of more than a few rows."""
    if cpu_library.load_library() is None or (request.param == "pairs" and not cpu_library.has_pairs()):
        pytest.skip("no compiler, or no AVX-512 BF16")
    monkeypatch.setattr(cpu_kernels, "_PROCESSOR", KINDS[request.param])


def round_up(values):
    """fp64 values as bf16, rounded once."""
    return values.float().bfloat16()


@needs_compiler
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 15, 17, 33, 129, 300])
@pytest.mark.parametrize("width_in", [1, 2, 63, 256])
def test_products_of_bf16_equal_exact_ones_rounded_where_torch_rounds(
    compiled, threads, kind, monkeypatch, rows, width_in
):
    monkeypatch.setattr(cpu_kernels, "THREAD_ELEMENTS", 1)
    linears = [(w.t().bfloat16().t(), b.bfloat16()) for w, b in build_linears(width_in, 5, 12, 101)]
    linears.append((linears[-1][0], None))
    for layout in (torch.clone, by_columns, lambda x: x.repeat(1, 3)[:, 1 : x.shape[1] + 1]):
        x, residual = (layout(torch.randn(rows, width).bfloat16()) for width in (width_in, 101))
        assert cpu_kernels.can_multiply(x, linears, residual)
        exact = [round_up(exact_product(x, *linear)) for linear in linears]
        for output, expected, linear in zip(cpu_kernels.products(x, linears), exact, linears, strict=True):
            assert_near(output, expected, torch.bfloat16)
            assert torch.equal(cpu_kernels.widened_product(x, linear), output.float())
        (output,) = cpu_kernels.products(x, linears[-1:], residual)
        (product,) = cpu_kernels.products(x, linears[-1:])
        assert torch.equal(output, product + residual)


@needs_compiler
@pytest.mark.parametrize("activation", ["silu", "relu2", "gelu_new"])
@pytest.mark.parametrize("rows", [3, 32])
def test_activated_products_of_bf16_round_like_torchs_operators(compiled, kind, activation, rows):
    x, act = torch.randn(rows, 62).bfloat16(), ACTIVATIONS[activation]
    up, gate = ((w.t().bfloat16().t(), b.bfloat16()) for w, b in build_linears(62, 100) + build_linears(62, 100))
    inner, outer = cpu_kernels.products(x, [up, gate])
    assert_near(cpu_kernels.activated_product(x, up, gate, activation), act(outer) * inner, torch.bfloat16)
    assert_near(cpu_kernels.activated_product(x, up, None, activation), act(inner), torch.bfloat16)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 4, 16, 40])
def test_a_row_of_a_bf16_product_does_not_depend_on_the_others(compiled, kind, rows):
    x, linears = torch.randn(rows + 3, 300).bfloat16(), [(torch.randn(100, 300).bfloat16().t(), None)]
    first = rows > 8  # a few rows are summed in another order than many
    (whole,) = cpu_kernels.products(x[: rows + 3 * first], linears)
    for start in range(4 if first else 1):
        (part,) = cpu_kernels.products(x[start : start + rows], linears)
        assert torch.equal(part, whole[start : start + rows])


@pytest.mark.parametrize(
    ("cpuinfo", "widens", "pairs"),
    [
        ("vendor_id : GenuineIntel\nflags : avx2 avx512f avx512_bf16", True, False),
        ("vendor_id : GenuineIntel\nflags : avx2 avx512f avx512_bf16 amx_bf16", False, False),
        ("vendor_id : AuthenticAMD\nflags : avx2 avx512f avx512_bf16", True, True),
        ("vendor_id : AuthenticAMD\nflags : avx2", True, False),
        ("Features : asimd bf16", False, False),
    ],
)
def test_the_processor_decides_how_bf16_is_multiplied(cpuinfo, widens, pairs):
    processor = cpu_kernels.Processor.of(cpuinfo)
    assert (processor.widens, processor.multiplies_pairs) == (widens, pairs)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_for_another_width_is_refused(compiled, dtype):
    input, weight = torch.randn(4, 48, dtype=dtype), torch.randn(80, 64, dtype=dtype).t()
    with pytest.raises(RuntimeError, match=r"4x48 and 64x80|primitive"):  # torch's own error, or oneDNN's
        linears_transposed(input, [(weight, None), (weight, None)])


@needs_compiler
@pytest.mark.skipif(os.name != "posix", reason="a page is closed by mprotect")
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 15, 17, 31, 33, 100])
@pytest.mark.parametrize("width_in", [1, 2, 5, 63])
def test_products_read_nothing_behind_their_input(rows, width_in):
    num_bytes, page = rows * width_in * 4, mmap.PAGESIZE
    end = -(-num_bytes // page) * page
    memory = mmap.mmap(-1, end + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + end), ctypes.c_size_t(page), 0) == 0
    values = (ctypes.c_float * (rows * width_in)).from_address(start + end - num_bytes)
    x, weight = torch.frombuffer(values, dtype=torch.float32).view(width_in, rows).t(), torch.randn(20, width_in).t()
    x.normal_()
    (output,) = cpu_kernels.products(x, [(weight, None)])
    assert_near(output, exact_product(x, weight, None).float(), torch.float32)


@needs_compiler
@pytest.mark.parametrize("activation", ["silu", "relu2", "gelu_new"])
@pytest.mark.parametrize("rows", [3, 32])
def test_activated_products_equal_exact_ones(compiled, threads, activation, rows):
    x, act = torch.randn(rows, 63), ACTIVATIONS[activation]
    for (up,), (gate,) in ((build_linears(63, 100), build_linears(63, 100)), (build_linears(63, 7),) * 2):
        inner, outer = (exact_product(x, *linear).float() for linear in (up, gate))
        assert_near(cpu_kernels.activated_product(x, up, gate, activation), act(outer) * inner, torch.float32)
        assert_near(cpu_kernels.activated_product(x, up, None, activation), act(inner), torch.float32)


@needs_compiler
def test_results_are_like_their_inputs_whatever_new_tensors_are_by_default(compiled, monkeypatch):
    x, linears = torch.randn(4, 63), build_linears(63, 20)
    values, gamma = torch.randn(4, 300), torch.randn(63)
    op, qkv, cache, batch, weights = attention_case(torch.float32)

    def results():
        yield from cpu_kernels.products(x, linears)
        yield cpu_kernels.widened_product(x, linears[0])
        yield cpu_kernels.activated_product(x, linears[0], linears[0], "silu")
        yield cpu_kernels.log_sum_exp(values, 1.0)
        yield NORM_OPS["rms"](1e-5)(x, gamma)
        yield op(qkv, cache, batch, weights)

    expected = list(results())
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            actual = list(results())
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == torch.float32 and one.is_cpu and torch.equal(one, other)


@needs_compiler
def test_a_row_of_a_product_does_not_depend_on_the_others(compiled):
    x, linears = torch.randn(32, 300), build_linears(300, 100)
    (whole,) = cpu_kernels.products(x, linears)
    for rows in (range(9), range(7, 31), range(16)):  # a few rows are summed in another order
        (part,) = cpu_kernels.products(x[rows], linears)
        assert torch.equal(part, whole[rows])


@needs_compiler
def test_searches_over_a_vocabulary_equal_torchs(compiled, threads):
    inf, nan = float("inf"), float("nan")
    values = torch.randn(6, 1000) * 20
    values[1, 5:] = -inf
    values[2, 300], values[2, 100] = inf, -inf
    values[3, 300], values[3, 400] = nan, inf
    values[4] = -inf
    values[5, 20:30] = 77.0
    for rows in (values, values[:, :63], torch.zeros(2, 1)):
        assert torch.equal(cpu_kernels.first_largest(rows), rows.argmax(1))
        for temperature in (1.0, 0.3):
            expected = (rows.double() / temperature).logsumexp(1).float()
            actual = cpu_kernels.log_sum_exp(rows, temperature)
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-5, equal_nan=True)
    assert {"log_sum_exp", "first_largest"} == set(compiled)


@needs_compiler
def test_draws_take_the_first_token_whose_running_sum_exceeds_the_share(compiled, threads):
    inf, nan = float("inf"), float("nan")
    values = torch.randn(40, 1000) * 3
    values[1, 5:], values[2, :300], values[3] = -inf, -inf, -inf
    values[4, 300], values[5, 300] = nan, inf
    finite = [row for row in range(40) if row not in (3, 4, 5)]
    for rows in (values, values[:, :63], values[:, :128]):
        shares = torch.rand(40)
        shares[6:9] = torch.tensor([0.0, 1.0, 1.0 - 2**-24])
        tokens, sums = cpu_kernels.draw_rows(rows, shares)
        assert torch.equal(sums.nan_to_num(), cpu_kernels.log_sum_exp(rows, 1.0).nan_to_num())
        assert ((tokens >= 0) & (tokens < rows.shape[1])).all()
        for row in finite:
            if not rows[row].isfinite().any():
                continue
            weights = rows[row].double().softmax(0)
            below, upto = weights[: tokens[row]].sum(), weights[: tokens[row] + 1].sum()
            assert weights[tokens[row]] > 0 and below - 1e-6 <= shares[row] <= upto + 1e-6
    assert set(compiled) == {"draw_rows", "log_sum_exp"}


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_activations_equal_their_reference_in_every_order_of_memory(compiled, threads, name, dtype):
    assert set(cpu_kernels.ACTIVATIONS) == set(ACTIVATIONS)
    for num_rows, width in ((1, 1), (3, 1000), (33, 63)):
        gate, up = (4 * torch.randn(2, num_rows, width)).to(dtype)
        gate[0, 0] = 30.0
        expected = ACTIVATIONS[name](gate) * up
        halves = torch.cat((gate, up), 1).chunk(2, 1)
        for pair in ((gate, up), (by_columns(gate), by_columns(up)), (by_columns(gate), up), halves):
            assert_near(cpu_kernels.gated_activation(*pair, name), expected, dtype)
            assert_near(activate_and_multiply(*pair, name), expected, dtype)
    assert set(compiled) == {"gated_activation"}


FEATURES = {
    "plain": {},
    "one KV head": {"heads": (6, 1)},
    "groups": {"heads": (6, 2)},
    "window": {"heads": (4, 2), "window": 5},
    "soft-capping": {"softcap": 2.0},
    "sinks": {"heads": (4, 2), "has_sinks": True},
    "sinks and window": {"heads": (4, 2), "has_sinks": True, "window": 3},
    "ALiBi": {"has_alibi": True, "rotary_dim": None},
    "no rotary": {"rotary_dim": None},
    "part of the dimensions": {"rotary_dim": 6},
    "neighbours": {"rotary_dim": 8, "is_interleaved": True},
    "norms": {"qk_norm": "rms"},
    "odd dimension": {"head_dim": 20, "rotary_dim": 20},
}


def attention_case(dtype, heads=(4, 4), head_dim=16, rotary_dim=16, has_sinks=False, has_alibi=False, **options):
    """An op and its arguments: 5 rows of 1 to 21 tokens in scattered blocks of 8; k and v lie by columns."""
    num_heads, num_kv_heads = heads
    if "qk_norm" in options:
        options["qk_norm_eps"] = 1e-5
    op = SoftmaxContextOp(num_heads, num_kv_heads, head_dim, head_dim**-0.5, **options)
    positions = torch.tensor([0, 7, 8, 14, 20])
    q = torch.randn(5, num_kv_heads, num_heads // num_kv_heads, head_dim).to(dtype)
    k, v = (
        by_columns(torch.randn(5, num_kv_heads * head_dim).to(dtype)).unflatten(1, (num_kv_heads, -1)) for _ in "kv"
    )
    keys, values = torch.randn(2, 16, num_kv_heads, 8, head_dim).to(dtype)
    batch = DecodeBatch(
        tokens=positions,
        positions=positions,
        block_tables=torch.randperm(16)[:15].view(5, 3),
        context=21,
        is_identity=False,
    )
    rotary = None
    if rotary_dim is not None:
        frequencies = 1 / 100 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
        table = rotary_table(frequencies, 1.0, 21, dtype, options.get("is_interleaved", False))
        rotary = (table[0][positions], table[1][positions])
    gammas = torch.randn(2, head_dim).to(dtype) if "qk_norm" in options else (None, None)
    sinks = torch.randn(num_heads).to(dtype) if has_sinks else None
    alibi = torch.rand(num_heads) if has_alibi else None
    return op, QKV(q, k, v, rotary), KVBlocks(keys, values), batch, HeadWeights(*gammas, sinks, alibi)


def widened(tensors):
    """A tuple of tensors, of such tuples or of None, in fp64."""
    if tensors is None or torch.is_tensor(tensors):
        return tensors if tensors is None else tensors.double()
    parts = map(widened, tensors)
    return type(tensors)(*parts) if hasattr(tensors, "_fields") else tuple(parts)


@needs_compiler
def test_tokens_that_are_decoded_one_by_one_see_what_they_see_when_they_are_prefilled_together(compiled):
    op, (q, k, v, _), (keys, values), *_ = attention_case(torch.float32, rotary_dim=None)
    table = [3, 9, 4]

    def attend(batch, rows):
        return op(QKV(q[rows], k[rows], v[rows]), cache, batch)

    cache = KVBlocks(keys.clone(), values.clone())
    one_by_one = []
    for row, place in enumerate(range(10, 15)):
        positions = torch.tensor([place])
        batch = DecodeBatch(
            tokens=positions,
            positions=positions,
            block_tables=torch.tensor([table]),
            context=place + 1,
            is_identity=False,
        )
        one_by_one.append(attend(batch, [row]))
    assert compiled.count("decode_attention") == 5
    cache = KVBlocks(keys.clone(), values.clone())
    prompt = Prompt(list(range(15)))
    together = attend(
        pack_prefills([Prefill(prompt, prompt.tokens, table, 10, 15)], 8, False, keys.device), list(range(5))
    )
    assert compiled[-1] == "prefill_attention" and torch.equal(together, torch.cat(one_by_one))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FEATURES)
def test_decode_attention_equals_its_reference_and_writes_the_same_keys(compiled, threads, name, dtype, monkeypatch):
    op, qkv, cache, batch, weights = attention_case(dtype, **FEATURES[name])
    wide_cache = widened(cache)
    context = op(qkv, cache, batch, weights)
    assert compiled[-1] == "decode_attention"
    monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", "1")
    num_calls = len(compiled)
    expected = op(widened(qkv), wide_cache, batch, widened(weights))
    assert len(compiled) == num_calls
    # In bf16 queries, keys and their norms are rounded before they are multiplied, each by half a unit.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-6}[dtype]
    largest = float(expected.abs().max())
    torch.testing.assert_close(context.double(), expected, rtol=tolerance, atol=tolerance * largest)
    for ours, written in zip(cache, wide_cache, strict=True):
        torch.testing.assert_close(ours.double(), written, rtol=tolerance, atol=tolerance)


PARTS = ([(0, 20), (0, 3), (0, 50)], [(0, 17), (0, 1), (9, 50)])
"""Tokens of three sequences that a pass feeds: all, and with a sequence that goes on."""


def prefill_case(dtype, parts, **options):
    """An op and its arguments: sequences of 20, 3 and 50 tokens in scattered blocks of 8."""
    op, _, cache, _, weights = attention_case(dtype, **options)
    tables = [[3, 9, 4], [0], [1, 15, 2, 8, 5, 12, 7]]
    lengths = [20, 3, 50]
    prompts = [Prompt(list(range(length))) for length in lengths]
    prefills = [
        Prefill(prompt, prompt.tokens, table, *part) for prompt, table, part in zip(prompts, tables, parts, strict=True)
    ]
    batch = pack_prefills(prefills, 8, False, torch.device("cpu"))
    places = torch.cat([torch.arange(*part) + sum(lengths[:r]) for r, part in enumerate(parts)])
    q = torch.randn(73, op.num_kv_heads, op.num_heads // op.num_kv_heads, op.head_dim).to(dtype)
    k, v = torch.randn(2, 73, op.num_kv_heads, op.head_dim).to(dtype)
    rotary, rotary_dim = None, options.get("rotary_dim", 16)
    if rotary_dim is not None:
        frequencies = 1 / 100 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
        table = rotary_table(frequencies, 1.0, 50, dtype, options.get("is_interleaved", False))
        rotary = (table[0][batch.positions], table[1][batch.positions])
    return op, QKV(q[places], k[places], v[places], rotary), cache, batch, weights


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FEATURES)
def test_prefill_attention_equals_its_reference_and_writes_the_same_keys(compiled, threads, name, dtype, monkeypatch):
    for parts in PARTS:
        op, qkv, cache, batch, weights = prefill_case(dtype, parts, **FEATURES[name])
        wide_cache = widened(cache)
        context = op(qkv, cache, batch, weights)
        assert compiled[-1] == "prefill_attention"
        expected = op.reference(widened(qkv), wide_cache, batch, widened(weights))
        tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-6}[dtype]
        largest = float(expected.abs().max())
        torch.testing.assert_close(context.double(), expected, rtol=tolerance, atol=tolerance * largest)
        for ours, written in zip(cache, wide_cache, strict=True):
            torch.testing.assert_close(ours.double(), written, rtol=tolerance, atol=tolerance)


@needs_compiler
@pytest.mark.parametrize("name", ["groups", "sinks and window"])
def test_attention_of_a_prompt_is_the_same_to_the_bit_however_it_is_cut(compiled, threads, name):
    op, (q, k, v, rotary), cache, batch, weights = prefill_case(torch.float32, PARTS[0], **FEATURES[name])
    whole = op(QKV(q, k, v, rotary), cache, batch, weights)[23:]
    prompt, table = Prompt(list(range(50))), [1, 15, 2, 8, 5, 12, 7]
    for cut in (1, 7, 16, 33):
        pieces = []
        for first, last in ((0, cut), (cut, 50)):
            part = pack_prefills([Prefill(prompt, prompt.tokens, table, first, last)], 8, False, q.device)
            rows = slice(23 + first, 23 + last)
            rotations = (rotary[0][rows], rotary[1][rows])
            pieces.append(op(QKV(q[rows], k[rows], v[rows], rotations), cache, part, weights))
        assert torch.equal(torch.cat(pieces), whole)


@needs_compiler
def test_prefill_attention_finds_tokens_wherever_they_lie(compiled):
    op, qkv, (keys, values), batch, weights = prefill_case(torch.float32, PARTS[0])
    places = torch.randperm(16 * 8)[:73]
    batch = replace(batch, write_blocks=places // 8, write_offsets=places % 8)
    wide_cache = widened(KVBlocks(keys, values))
    context = op(qkv, KVBlocks(keys, values), batch, weights)
    assert compiled[-1] == "prefill_attention"
    torch.testing.assert_close(context.double(), op.reference(widened(qkv), wide_cache, batch), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(keys.double(), wide_cache.keys, rtol=2e-6, atol=2e-6)


@needs_compiler
def test_a_block_beyond_the_workspace_is_an_error_in_a_prefill_too(compiled):
    op, qkv, cache, batch, weights = prefill_case(torch.float32, PARTS[0])
    batch.write_blocks[31] = 16
    before = cache.keys.clone()
    with pytest.raises(ValueError, match="a row's position lies beyond its context or blocks"):
        op(qkv, cache, batch, weights)
    assert torch.equal(cache.keys, before)


@needs_compiler
@pytest.mark.parametrize("change", [{"positions": 24}, {"positions": -1}, {"block_tables": 16}])
def test_a_place_beyond_the_workspace_is_an_error_and_not_written_to(compiled, change):
    op, qkv, cache, batch, weights = attention_case(torch.float32)
    ((name, wrong),) = change.items()
    getattr(batch, name).view(-1)[-1] = wrong
    if name == "block_tables":
        batch.positions[-1] = 20
    before = cache.keys.clone()
    with pytest.raises(ValueError, match="a row's position lies beyond its context or blocks"):
        op(qkv, cache, batch, weights)
    assert torch.equal(cache.keys, before)


@needs_compiler
def test_what_is_not_plain_runs_in_torch(compiled, monkeypatch):
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x, gamma = torch.randn(4, 8), torch.ones(8)
    op = NORM_OPS["rms"](1e-5)
    op(x, gamma)
    assert compiled == ["norm"]
    for input, weight in (
        (x.double(), gamma.double()),
        (x.half(), gamma.half()),
        (x, gamma.double()),
        (x.to("meta"), gamma.to("meta")),
        (x.clone().requires_grad_(), gamma),
        (x, torch.ones(16)[::2]),
        (x[:0], gamma),
    ):
        assert op(input, weight).shape == input.shape
    with Watching():
        op(x, gamma)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        op(x, gamma)
    monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", "1")
    op(x, gamma)
    assert compiled == ["norm"]


@needs_compiler
def test_a_pass_whose_memory_is_measured_computes_what_any_other_does_to_the_bit(compiled):
    """Which passes are measured depends on where a run began: one that goes on must give the same numbers."""
    hidden, weight = torch.randn(460, 128) * 0.3, torch.randn(16, 128) * 0.3
    targets = torch.randint(16, (460,))

    def compute():
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs = linear_log_prob(*leaves, targets).logprobs
        logprobs.sum().backward()
        return logprobs, *(leaf.grad for leaf in leaves)

    expected = compute()
    with LiveBytes() as live:
        found = compute()
    assert live.peak_bytes > 0 and compiled == ["exp_rows"] * 2
    assert all(map(torch.equal, found, expected))


# Windows, norms of queries and keys, soft-capping, layer norms, ALiBi, sinks, neighbours as rotary pairs.
FAMILIES = ("llama", "qwen2-mixed-windows", "qwen3-qk-norm", "gemma2", "gpt2", "bloom", "gpt-oss", "gptj")


@needs_compiler
@pytest.mark.parametrize("family", FAMILIES)
def test_rollouts_on_compiled_functions_equal_the_models_own(compiled, family):
    model = build_model(family)
    input_ids, mask = padded_prompts()
    greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": [7, 11], "pad_token_id": PAD}
    expected = model.generate(input_ids, attention_mask=mask, **greedy)
    config = {"train_batch_size": 1, "hybrid_engine": {"enabled": True, "kv_block_size": 4}}
    engine, *_ = hybrid_engine.initialize(model=build_model(family), config=config)
    output = engine.eval().generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **greedy)
    assert torch.equal(output.sequences, expected)
    assert "decode_attention" in compiled and "norm" in compiled
    assert "compiled functions" in engine.report()
    trainer = module_logprobs(model, output.sequences, mask)
    is_response = torch.arange(output.logprobs.shape[1]) < output.lengths[:, None]
    torch.testing.assert_close(output.logprobs[is_response], trainer[is_response].float(), atol=1e-5, rtol=0)


@needs_compiler
def test_the_library_shares_torchs_pool_of_threads(compiled):
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not list what a process has loaded")
    torch.randn(300, 300) @ torch.randn(300, 300)
    pools = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    assert pools == {str(cpu_library.openmp_runtime())}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder; the library of this process is not asked for."""
    monkeypatch.setenv("HYBRID_ENGINE_CACHE", str(tmp_path))
    monkeypatch.setattr(dispatch, "_said", set())
    return tmp_path / "compiled"


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A short source in the place of the real one."""
    source = tmp_path / "short.c"
    source.write_text("int answer(void) { return 42; }\n")
    monkeypatch.setattr(cpu_library, "SOURCES", [source])
    return source


def find_again():
    return cpu_library.load_library.__wrapped__()


def test_without_a_compiler_torch_runs_and_one_line_says_so(cache, monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler -O1")
    assert find_again() is None and find_again() is None
    lines = [record.message for record in caplog.records]
    assert lines == [
        "operations on the CPU run one by one in torch, more slowly: there is no C compiler 'no-such-compiler'; "
        "install one, such as gcc, or name it by CC"
    ]


@needs_compiler
def test_a_source_that_does_not_compile_names_the_first_error_and_leaves_nothing(cache, quick, caplog):
    quick.write_text("int answer(void) { return forty_two; }\n")
    assert find_again() is None
    assert "forty_two" in caplog.records[0].message and "error" in caplog.records[0].message
    assert list(cache.iterdir()) == []


@needs_compiler
def test_a_library_is_compiled_once_and_again_where_its_file_or_source_changed(cache, quick, monkeypatch):
    compilations = []
    run = cpu_library._compile
    monkeypatch.setattr(cpu_library, "_compile", lambda command: (compilations.append(1), run(command)))
    assert find_again().answer() == 42 and find_again().answer() == 42
    assert len(compilations) == 1
    (path,) = cache.iterdir()
    assert cache.stat().st_mode & 0o777 == 0o700
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        path.unlink()  # what is loaded must not change below its process
        path.write_bytes(broken)
        assert find_again().answer() == 42
        assert cpu_library.is_whole(path)
    assert len(compilations) == 4
    quick.write_text("int answer(void) { return 43; }\n")
    assert find_again().answer() == 43 and len(list(cache.iterdir())) == 2


@needs_compiler
def test_nothing_is_loaded_from_a_folder_that_others_can_write_to(cache, quick):
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    assert find_again().answer() == 42
    assert list(cache.iterdir()) == []
    link = cache.with_name("elsewhere")
    cache.chmod(0o700)
    cache.rename(link)
    cache.symlink_to(link)
    assert find_again().answer() == 42 and list(link.iterdir()) == []


@needs_compiler
def test_a_file_of_another_user_is_not_loaded(cache, quick, monkeypatch):
    find_again()
    (path,) = cache.iterdir()
    assert cpu_library.is_whole(path)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert not cpu_library.is_whole(path) and not cpu_library.make_private(cache)


@needs_compiler
def test_a_compilation_that_is_killed_harms_nobody(cache, quick, monkeypatch):
    run = cpu_library._compile

    def interrupted(command):
        Path(command[-1]).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(cpu_library, "_compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        find_again()
    assert list(cache.iterdir()) == []
    # What no `finally` could remove.
    old, new = cache / "old.part", cache / "new.part"
    for left in (old, new):
        left.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * cpu_library.STALE_SECONDS,) * 2)
    monkeypatch.setattr(cpu_library, "_compile", run)
    assert find_again().answer() == 42
    assert not old.exists() and new.exists()


@needs_compiler
def test_several_that_compile_at_once_get_a_whole_library_each(cache, quick, monkeypatch):
    run, gate = cpu_library._compile, threading.Barrier(3)
    monkeypatch.setattr(cpu_library, "_compile", lambda command: (gate.wait(30), run(command)))
    answers = []
    workers = [threading.Thread(target=lambda: answers.append(find_again().answer())) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert answers == [42] * 3
    (path,) = cache.iterdir()
    assert cpu_library.is_whole(path)
