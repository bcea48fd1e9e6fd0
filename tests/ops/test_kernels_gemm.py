"""Kernels of norms, linears and the MLP against their references, and the launches that they take."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_engine.ops import (
    NORM_OPS,
    GatedActivationOp,
    GELUGemmOp,
    LinearOp,
    MLPGemmOp,
    QKVGemmOp,
    ResidualAddOp,
    VectorMatMulOp,
    dispatch,
    linears_kernels,
)
from hybrid_engine.ops.dispatch import Launch, forget_prepared
from hybrid_engine.ops.linears import ACTIVATIONS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STORED = ["[out, in]", "[in, out]", "strided"]
pytestmark = [pytest.mark.usefixtures("poisoned"), pytest.mark.long]


@pytest.fixture
def poisoned():
    """Memory that nobody has written reads as NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_splits(monkeypatch):
    """K is split where there is little of it."""
    monkeypatch.setattr(linears_kernels, "SPLIT_BYTES", 2000)
    _forget_tiles()
    yield
    _forget_tiles()


def _forget_tiles():
    linears_kernels.choose_tiles.cache_clear()
    forget_prepared()


@pytest.fixture
def launches(monkeypatch):
    """Names of the kernels launched."""
    names, start = [], Launch.__call__

    def counted(launch, *args):
        names.append(launch.kernel.__name__)
        start(launch, *args)

    monkeypatch.setattr(Launch, "__call__", counted)
    return names


class TorchKernels(TorchDispatchMode):
    """Lists the aten operators that compute: neither views nor empty buffers."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        aliases = any(result.alias_info is not None for result in func._schema.returns)
        if not aliases and "empty" not in func.name() and "split" not in func.name():
            self.names.append(func.name())
        return output


def randn(*shape, like=None, scale=1.0):
    dtype, device = like
    return (torch.randn(*shape) * scale).to(dtype).to(device)


def weight_of(stored, n_in, n_out, like):
    scale = n_in**-0.5
    if stored == "[out, in]":
        return randn(n_out, n_in, like=like, scale=scale).t()
    if stored == "[in, out]":
        return randn(n_in, n_out, like=like, scale=scale)
    return randn(2 * n_in, 2 * n_out, like=like, scale=scale)[::2, ::2]


def tensors_of(nested):
    return [nested] if torch.is_tensor(nested) else [t for part in nested for t in tensors_of(part)]


def widen(nested):
    if torch.is_tensor(nested):
        return nested.double() if nested.is_floating_point() else nested
    return type(nested)(widen(part) for part in nested) if isinstance(nested, (tuple, list)) else nested


def check(op, *args, call=None, terms=None):
    """The kernel's error against the reference in fp64 is at most 4 times the reference's own in this dtype.

    4: the interpreter cuts to bf16 where torch rounds, twice the error, in each of two places at most. Beside that two
    units in the last place of the largest result are allowed, or of `terms`, the largest sum of absolute terms: a
    library adds a long sum in pairs, a kernel one after the other, and the rounding of either grows with the terms.
    """
    actual, own, exact = (tensors_of(x) for x in ((call or op)(*args), op.reference(*args), op.reference(*widen(args))))
    for ours, theirs, truth in zip(actual, own, exact, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        own_error = (theirs.double() - truth).abs().max()
        limit = 4 * own_error + 2 * torch.finfo(theirs.dtype).eps * (truth.abs().max() if terms is None else terms)
        error = (ours.double() - truth).abs().max()
        assert error <= limit, f"{error=} {own_error=}"
    return actual


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NORM_OPS)
@pytest.mark.parametrize("width", [1, 63, 1000])
def test_norm_kernels_equal_their_references(kernels, launches, dtype, kind, width):
    like = dtype, kernels
    x = randn(14, width, like=like)[::2] + 2
    gamma = randn(width, like=like)
    beta = randn(width, like=like) if kind == "layer" else None
    op = NORM_OPS[kind](1e-5)
    check(op, x, gamma, beta)
    check(op, x.unflatten(0, (7, 1)).transpose(0, 1), gamma, beta)
    residual = randn(7, width, like=like)
    normed, total = op.add_and_norm(x, residual, gamma, beta)
    assert launches == ["norm_kernel"] * 3
    torch.testing.assert_close(total, x + residual, atol=0, rtol=torch.finfo(dtype).eps)
    check(op, total, gamma, beta, call=lambda *_: normed)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rows", [1, 63])
def test_linear_kernels_equal_their_references(kernels, launches, request, rows, stored, dtype, splits):
    like = dtype, kernels
    if splits:
        request.getfixturevalue("small_splits")
    x, weight = randn(2 * rows, 271, like=like)[::2], weight_of(stored, 271, 63, like)
    bias, residual = randn(63, like=like), randn(rows, 126, like=like)[:, :63]
    check(LinearOp(), x, weight, bias, residual)
    check(VectorMatMulOp(), x, weight)
    check(LinearOp(fp32_output=True), x, weight, bias)
    assert launches == ["linear_kernel"] * 3


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1000, 5), (5, 16, 1000), (0, 8, 8)], ids=str)
def test_linear_kernels_take_any_shape(kernels, shape):
    rows, n_in, n_out = shape
    like = torch.float32, kernels
    args = randn(rows, n_in, like=like), weight_of("[out, in]", n_in, n_out, like), randn(n_out, like=like)
    if rows:
        x, weight, bias = (tensor.abs().double() for tensor in args)
        check(LinearOp(), *args, terms=(x @ weight + bias).max())
    else:
        assert LinearOp()(*args).shape == (0, n_out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [None, *NORM_OPS])
@pytest.mark.parametrize("rows", [3, 7])
@pytest.mark.parametrize("fused", [None, "blocks", "grouped"])
def test_qkv_kernels_equal_their_references(kernels, launches, dtype, norm, rows, fused):
    like = dtype, kernels
    op = QKVGemmOp(norm, 1e-5, 6, 2, 7, layout=fused or "blocks")
    x, gamma = randn(rows, 100, like=like), None if norm is None else randn(100, like=like)
    beta = randn(100, like=like) if norm == "layer" else None
    widths = [70] if fused else [42, 14, 14]
    weights = [weight_of(stored, 100, width, like) for stored, width in zip(STORED, widths, strict=False)]
    biases = [randn(width, like=like) for width in widths]
    biases[1:2] = [None] * len(biases[1:2])
    check(op, x, weights, biases, gamma, beta)
    assert launches == (["norm_kernel"] if norm else []) + ["qkv_kernel"]
    (q, k, v), normed = op(x, weights, biases, gamma, beta)
    assert (q.shape, k.shape, v.shape, normed.shape) == ((rows, 2, 3, 7), (rows, 2, 7), (rows, 2, 7), x.shape)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1


def test_grouped_and_blocked_projections_hold_the_same_heads(kernels):
    like = torch.float32, kernels
    x, blocks = randn(2, 20, like=like), randn(20, 8, 5, like=like)  # heads: 4 of q, 2 of k, 2 of v
    grouped = blocks[:, [0, 1, 4, 6, 2, 3, 5, 7]]
    ours = [
        QKVGemmOp(None, 0.0, 4, 2, 5, layout)(x, [weight.flatten(1)], [None])[0]
        for layout, weight in (("blocks", blocks), ("grouped", grouped))
    ]
    for a, b in zip(*ours, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "has_residual"), [(2, False), (2, True), (6, False), (33, True)])
@pytest.mark.parametrize("form", ["gated", "plain", "fused"])
def test_mlp_kernels_equal_their_references(kernels, dtype, rows, form, has_residual):
    like = dtype, kernels
    x, gamma = randn(rows, 65, like=like), randn(65, like=like)
    residual = randn(rows, 65, like=like) if has_residual else None
    gate, up = (weight_of("[out, in]", 65, 81, like), randn(81, like=like)), (weight_of("strided", 65, 81, like), None)
    if form == "plain":
        gate = None
    if form == "fused":
        fused = weight_of("[out, in]", 65, 162, like)
        gate, up = (fused[:, :81], None), (fused[:, 81:], None)
    down = weight_of("[in, out]", 81, 65, like), randn(65, like=like)
    op = MLPGemmOp("rms", 1e-5, "silu", adds_residual=has_residual)
    check(op, x, residual, gate, up, down, gamma, None)
    check(MLPGemmOp(None, 0.0, "gelu"), x, residual, gate, up, down)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_in_kernels_equal_torchs(kernels, activation, dtype):
    like = dtype, kernels
    x, bias = randn(3, 2100, like=like, scale=4.0)[:, 50:2050], randn(2000, like=like)
    check(GatedActivationOp(), x, bias, activation)
    check(GatedActivationOp(), x, None, activation)
    if activation in ("gelu", "gelu_new"):
        weights = weight_of("[out, in]", 65, 81, like), randn(81, like=like), weight_of("[in, out]", 81, 65, like)
        check(GELUGemmOp(activation), randn(5, 65, like=like), *weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("after", [True, False])
def test_residual_add_kernels_equal_their_references(kernels, dtype, after):
    like = dtype, kernels
    hidden, residual, attention = (randn(3, 2200, like=like)[:, :1100] for _ in range(3))
    attention_bias, final_bias = randn(1100, like=like), randn(1100, like=like)
    op = ResidualAddOp(tp_size=3, mlp_after_attention=after)
    before = residual.clone()
    check(op, hidden, residual, True, attention, None, attention_bias, final_bias)
    check(op, hidden, residual, False, None, attention, attention_bias)
    check(op, hidden, residual)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("small_splits")
def test_a_row_alone_gives_the_bits_that_it_gives_in_a_batch(kernels, dtype):
    like = dtype, kernels
    x, gamma = randn(4, 200, like=like), randn(200, like=like)
    gate, up = ((weight_of("[out, in]", 200, 40, like), None) for _ in range(2))
    down = weight_of("[out, in]", 40, 200, like), None
    mlp, qkv, linear = MLPGemmOp("layer", 1e-5, "silu", True), QKVGemmOp("rms", 1e-5, 2, 1, 10), LinearOp()
    ops = [
        lambda rows: mlp(rows, None, gate, up, down, gamma)[0],
        lambda rows: qkv(rows, [gate[0]], [None], gamma)[0],
        lambda rows: linear(rows, up[0]),
    ]
    for op in ops:
        whole = tensors_of(op(x))
        for row in (0, 3):
            for alone, batch in zip(tensors_of(op(x[row : row + 1])), whole, strict=True):
                assert torch.equal(alone, batch[row : row + 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "stored"), [(65, "[out, in]"), (128, "strided"), (130, "[in, out]")])
@pytest.mark.usefixtures("small_splits")
def test_wide_tiles_equal_the_references(kernels, launches, rows, stored, dtype):
    like = dtype, kernels
    x, residual = randn(2 * rows, 200, like=like)[::2], randn(rows, 280, like=like)[:, :140]
    weight, bias = weight_of(stored, 200, 140, like), randn(140, like=like)
    linear = LinearOp()
    tiles = linears_kernels.choose_tiles(rows, 200, (140,), dtype, can_split=True)
    assert (tiles.splits > 1) == (rows <= 128)
    for _ in range(2):  # the second finds the counts of those that have arrived as the first did
        check(linear, x, weight, bias, residual)
    check(LinearOp(), x, weight, None, residual)
    widths = (42, 14, 14)
    weights = [weight_of(stored, 200, width, like) for width in widths]
    gamma, biases = randn(200, like=like), [randn(width, like=like) for width in widths]
    check(QKVGemmOp("rms", 1e-5, 6, 2, 7), x, weights, biases, gamma, None)
    down = weight_of(stored, 140, 200, like), None
    for gate in (None, (weight_of(stored, 200, 140, like), bias)):
        check(MLPGemmOp("rms", 1e-5, "silu", adds_residual=True), x, None, gate, (weight, None), down, gamma, None)
    expected = ["linear_kernel"] * 3 + ["norm_kernel", "qkv_kernel"]
    assert launches == expected + ["norm_kernel", "up_kernel", "linear_kernel"] * 2


def test_rows_that_torch_multiplies_as_well_take_one_of_its_products(kernels, launches):
    like = torch.bfloat16, kernels
    x, weight = randn(70, 24, like=like), weight_of("[out, in]", 24, 8, like)
    check(LinearOp(), x, weight)
    check(LinearOp(fp32_output=True), x, weight)
    check(LinearOp(), x.float(), weight.float(), None, x[:, :8].float())
    assert launches == []


@pytest.mark.parametrize("rows", [1, 16, 64, 65, 129, 256])
def test_a_layers_products_take_six_launches_two_of_them_norms(kernels, launches, rows):
    like = torch.bfloat16, kernels
    x, gamma = randn(rows, 24, like=like), randn(24, like=like)
    weights = [weight_of("[out, in]", 24, 24, like) for _ in range(7)]
    qkv, output = QKVGemmOp("rms", 1e-5, 4, 4, 6), LinearOp()
    mlp = MLPGemmOp("rms", 1e-5, "silu", adds_residual=True)
    with TorchKernels() as torch_kernels:
        (q, _, _), _ = qkv(x, weights[:3], [None] * 3, gamma)
        stream = output(q.flatten(1), weights[3], None, x)
        mlp(stream, None, (weights[4], None), (weights[5], None), (weights[6], None), gamma)
    assert launches == ["norm_kernel", "qkv_kernel", "linear_kernel", "norm_kernel", "up_kernel", "linear_kernel"]
    assert torch_kernels.names == []


def test_products_are_cut_so_that_they_fill_an_h100():
    for n_in, n_out, splits in (
        (4096, 128256, 1), (2048, 8192, 1), (896, 896, 1), (4096, 4096, 2), (14336, 4096, 2), (2048, 2048, 4),
        (8192, 2048, 4), (4864, 896, 8), (32768, 512, 8),
    ):  # fmt: skip
        tiles = linears_kernels.choose_tiles(1, n_in, (n_out,), torch.bfloat16, can_split=True)
        assert tiles.splits == splits
        assert tiles.programs(n_out) * splits >= 50
        assert tiles.programs(n_out) * splits <= linears_kernels.NUM_SMS or splits == 1
    for rows in (1, 17, 33, 113, 241):
        widths = {linears_kernels.choose_tiles(m, 4096, (4096,), torch.bfloat16) for m in (rows, rows + 15)}
        assert len(widths) == 1, "rows of one padding are cut alike"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.randn(9, 4)}, "linear weight has shape"),
        ({"weight": torch.randn(8, 4).half()}, "linear weight is torch.float16; expected torch.float32"),
        ({"bias": torch.randn(5)}, "linear bias has shape"),
        ({"residual": torch.randn(3, 5)}, "residual has shape"),
        ({"residual": torch.randn(4, 3).t()}, "residual has strides"),
        ({"input": torch.randn(8)}, "input has shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_do_not_fit_are_named_before_a_launch(kernels, launches, change, message):
    given = {"input": torch.randn(3, 8), "weight": torch.randn(8, 4), "bias": torch.randn(4), **change}
    with pytest.raises(ValueError, match=message):
        LinearOp()(**{name: tensor.to(kernels) for name, tensor in given.items()})
    assert launches == []


def test_numbers_and_names_that_no_op_takes_are_refused(kernels):
    x = torch.randn(2, 8, device=kernels)
    with pytest.raises(ValueError, match=r"layout='rows' must be one of blocks, grouped"):
        QKVGemmOp(None, 0.0, 2, 2, 4, layout="rows")
    with pytest.raises(ValueError, match=r"2 weights with 2 biases; expected 1 or 3"):
        QKVGemmOp(None, 0.0, 2, 2, 4)(x, [x.t()] * 2, [None] * 2)
    with pytest.raises(ValueError, match=r"gamma has shape \[7\]; expected \[8\]"):
        NORM_OPS["rms"](1e-5)(x, x[0, :7])
    with pytest.raises(ValueError, match=r"activation='relu' must be one of gelu, gelu_new"):
        GELUGemmOp("relu")
    with pytest.raises(ValueError, match=r"type='tanh' must be one of silu"):
        GatedActivationOp()(x, None, "tanh")
    with pytest.raises(ValueError, match="an even number"):
        GatedActivationOp()(x[:, :7], None, "silu")


def test_norms_wider_than_a_kernel_holds_run_on_torch_and_say_so(kernels, launches, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_said", set())
    x, gamma = torch.randn(1, 40000, device=kernels), torch.ones(40000, device=kernels)
    op = NORM_OPS["rms"](1e-5)
    for _ in range(2):
        torch.testing.assert_close(op(x, gamma), op.reference(x, gamma), atol=0, rtol=0)
    assert launches == [] and caplog.text.count("norms wider than") == 1
