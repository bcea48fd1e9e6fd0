"""Log-probabilities straight from hidden states: equal to those of the logits, whatever the tiles, and never all logits
at once."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid_engine.metrics.memory import LiveBytes
from hybrid_engine.ops import cpu_kernels, linear_log_prob_tiles
from hybrid_engine.ops import linear_log_prob as op
from hybrid_engine.ops.linear_log_prob import PLAIN, LogitShape, _plus_product, linear_log_prob, piece_bytes
from hybrid_engine.rlhf.batches.head_log_probs import vocabulary_share
from tests.support.distributed import run_distributed

pytestmark = pytest.mark.quick

N, E, V = 63, 24, 301
SHAPES = [LogitShape(), LogitShape(temperature=0.7), LogitShape(0.25, 2.0, 1.3)]


def build_case(dtype=torch.float32, num_rows=N, has_bias=True):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, E, generator=generator).to(dtype) for n in (num_rows, V))
    bias = torch.randn(V, generator=generator).to(dtype) if has_bias else None
    return hidden, weight, torch.randint(V, (num_rows,), generator=generator), bias


def plain(hidden, weight, targets, bias, shape):
    """What torch gives from the logits."""
    logits = functional.linear(hidden, weight, bias) * shape.scale
    if shape.softcap:
        logits = torch.tanh(logits / shape.softcap) * shape.softcap
    logprobs = functional.log_softmax(
        logits.to(torch.promote_types(logits.dtype, torch.float32)) / shape.temperature, -1
    )
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def run(function, case, trained, with_entropy):
    """Log-probabilities, entropy, and the gradients of `trained` of a weighted sum of both."""
    tensors = [None if x is None else x.detach().clone() for x in case]
    leaves = [x.requires_grad_() for x, name in zip(tensors, ("hidden", "weight", "targets", "bias"), strict=True)
              if x is not None and name in trained]  # fmt: skip
    logprobs, entropy = function(*tensors)
    weights = torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype, device=logprobs.device)
    loss = (weights * logprobs).sum() + ((weights.flip(0) * entropy).sum() if with_entropy else 0)
    return [logprobs, *([entropy] if with_entropy else []), *torch.autograd.grad(loss, leaves)]


def assert_as_good(found, expected, exact):
    """No further from the exact numbers than four times what torch's own way is, or a rounding of their size."""
    for ours, theirs, right in zip(found, expected, exact, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        error, allowed = (ours.double() - right).abs().max(), 4 * (theirs.double() - right).abs().max()
        assert error <= allowed + 4 * torch.finfo(ours.dtype).eps * right.abs().max()


def compare(case, shape, with_entropy, trained):
    """Asserts that values and gradients are as good as those of torch's logits."""
    found = run(lambda *case: linear_log_prob(*case, shape, with_entropy), case, trained, with_entropy)
    expected = run(lambda *case: plain(*case, shape), case, trained, with_entropy)
    doubled = [x if x is None or not x.is_floating_point() else x.double() for x in case]
    assert_as_good(found, expected, run(lambda *case: plain(*case, shape), doubled, trained, with_entropy))


@pytest.fixture(params=["one tile", "many tiles", "some kept", "some kept, by oneDNN"])
def tiles(request, monkeypatch):
    by_onednn = request.param.endswith("oneDNN")
    monkeypatch.setattr(cpu_kernels, "is_intel", lambda: not by_onednn)
    for module in (cpu_kernels, op):
        monkeypatch.setattr(module, "mkl_leaves_half", lambda: by_onednn)
    if request.param != "one tile":
        monkeypatch.setattr(op, "ROWS_AT_ONCE", 20)
        monkeypatch.setattr(linear_log_prob_tiles, "LEAST_COLUMNS", 37)
        monkeypatch.setattr(linear_log_prob_tiles, "TILE_BYTES", 1)
        monkeypatch.setattr(op, "KEPT_BYTES", 4 * 20 * 37 * 5 if request.param.startswith("some") else 0)


@pytest.mark.parametrize("trained", [("hidden",), ("weight",), ("hidden", "weight", "bias")], ids="-".join)
@pytest.mark.parametrize("with_entropy", [False, True], ids=["logprobs", "entropy"])
@pytest.mark.parametrize("shape", SHAPES, ids=["plain", "temperature", "capped"])
@pytest.mark.usefixtures("tiles")
def test_values_and_gradients_are_those_of_the_logits(shape, with_entropy, trained):
    compare(build_case(), shape, with_entropy, trained)


@pytest.mark.parametrize("trained", [("hidden",), ("hidden", "weight")], ids="-".join)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("tiles")
def test_sixteen_bits_are_as_good_as_the_logits(dtype, trained):
    compare(build_case(dtype, has_bias=False), LogitShape(), False, trained)


WRONG = {
    "another width": (lambda h, w, t, b: (h, w[:, 1:], t, b), "weight has shape"),
    "a third dimension": (lambda h, w, t, b: (h[None], w, t, b), "hidden has shape"),
    "another dtype": (lambda h, w, t, b: (h, w.bfloat16(), t, b), "weight is torch.bfloat16"),
    "integers": (lambda h, w, t, b: (h.long(), w.long(), t, None), "hidden is torch.int64"),
    "a short bias": (lambda h, w, t, b: (h, w, t, b[:1]), "bias has shape"),
    "a bias of another dtype": (lambda h, w, t, b: (h, w, t, b.double()), "bias is torch.float64"),
    "few targets": (lambda h, w, t, b: (h, w, t[1:], b), "targets has shape"),
    "targets in a column": (lambda h, w, t, b: (h, w, t[:, None], b), "targets has shape"),
    "float targets": (lambda h, w, t, b: (h, w, t.float(), b), "targets is torch.float32"),
    "the index of padding": (
        lambda h, w, t, b: (h, w, t.index_fill(0, t.new_tensor([3]), -100), b),
        "targets has -100",
    ),
    "a target too high": (lambda h, w, t, b: (h, w, t.index_fill(0, t.new_tensor([3]), V), b), f"targets has {V}"),
    "no vocabulary": (lambda h, w, t, b: (h, w[:0], t, None), "at least one row"),
    "no width": (lambda h, w, t, b: (h[:, :0], w[:, :0], t, None), "at least one row and one column"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_fit_is_refused_by_name(kind):
    change, words = WRONG[kind]
    with pytest.raises(ValueError, match=words):
        linear_log_prob(*change(*build_case()))


@pytest.mark.parametrize(
    "shape",
    [
        LogitShape(temperature=0.0),
        LogitShape(temperature=-1.0),
        LogitShape(softcap=0.0),
        LogitShape(scale=float("nan")),
    ],
)
def test_a_shape_of_logits_without_meaning_is_refused(shape):
    with pytest.raises(ValueError, match="must be finite and"):
        linear_log_prob(*build_case(), shape)


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_second_derivative_is_refused(is_trained, with_entropy):
    hidden, weight, targets, _ = build_case()
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_(is_trained)
    found = linear_log_prob(hidden, weight, targets, with_entropy=with_entropy)
    (slope,) = torch.autograd.grad(found[-1 if with_entropy else 0].square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        slope.square().sum().backward()


def test_a_last_few_rows_are_cut_forwards_as_backwards(monkeypatch):
    monkeypatch.setattr(op, "ROWS_AT_ONCE", 60)
    monkeypatch.setattr(linear_log_prob_tiles, "LEAST_COLUMNS", 1)
    monkeypatch.setattr(
        linear_log_prob_tiles, "TILE_BYTES", 4 * 60 * 100
    )  # three tiles of 60 rows; one would do for three rows
    case = build_case()
    found = run(lambda *case: linear_log_prob(*case), case, ("hidden", "weight"), False)
    expected = run(lambda *case: plain(*case, LogitShape()), case, ("hidden", "weight"), False)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("tiles")
def test_a_logit_far_above_those_of_earlier_tiles_is_no_overflow():
    hidden, weight, targets, _ = build_case(has_bias=False)
    hidden, weight = hidden.round(), weight.round()  # logits of thousands are exact then, in whatever order
    weight[V - 3] = 400 * hidden[0]
    weight[V - 1] = -400 * hidden[0]
    compare((hidden, weight, targets, None), LogitShape(), False, ("hidden",))


def compare_without(ruled_out, case, shape, with_entropy):
    """Asserts that a bias of -inf for some tokens gives what a head without their rows does."""
    hidden, weight, targets, bias = case
    left = torch.tensor([token for token in range(len(weight)) if token not in ruled_out], device=weight.device)
    targets = targets % len(left)
    bias[list(ruled_out)] = -torch.inf

    def compute(weight, bias, targets):
        trained = ("hidden", "weight", "bias")
        of = (hidden, weight, targets, bias)
        return run(lambda *case: linear_log_prob(*case, shape, with_entropy), of, trained, with_entropy)

    *found, of_weight, of_bias = compute(weight, bias, left[targets])
    *expected, by_weight, by_bias = compute(weight[left], bias[left], targets)
    allowed = {"rtol": 1e-4, "atol": 1e-5} if hidden.dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    torch.testing.assert_close(found, expected, **allowed)
    torch.testing.assert_close((of_weight[left], of_bias[left]), (by_weight, by_bias), **allowed)
    assert not of_weight[list(ruled_out)].any() and not of_bias[list(ruled_out)].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("ruled_out", [range(150), range(40, V)], ids=["first", "last"])
@pytest.mark.parametrize("shape", [SHAPES[0], LogitShape(0.25, None, 0.7)], ids=["plain", "scaled"])
@pytest.mark.usefixtures("tiles")
def test_tokens_whose_bias_is_minus_infinity_are_as_if_they_were_not_there(ruled_out, shape, with_entropy, dtype):
    compare_without(ruled_out, build_case(dtype), shape, with_entropy)


def test_a_bias_of_minus_infinity_below_a_softcap_is_what_the_softcap_makes_of_it():
    case = build_case()
    case[3][5:9] = -torch.inf
    compare((*case[:2], case[2] % 5, case[3]), LogitShape(softcap=2.0), True, ("hidden",))


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("trained", [("hidden",), ("hidden", "weight", "bias")], ids="-".join)
def test_autocast_changes_nothing(trained, with_entropy, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "is_intel", lambda: True)  # by torch's own products, which heed autocast

    def compute():
        return run(lambda *case: linear_log_prob(*case, PLAIN, with_entropy), build_case(), trained, with_entropy)

    expected = compute()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = compute()
    assert all(map(torch.equal, found, expected))


def test_the_gradient_can_be_taken_twice(monkeypatch):
    hidden, weight, targets, _ = build_case(has_bias=False)
    weight.requires_grad_()
    loss = linear_log_prob(hidden, weight, targets).logprobs.sum()
    (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (second,) = torch.autograd.grad(loss, weight)
    assert torch.equal(first, second)


def test_no_rows_give_no_log_probabilities():
    hidden, weight, targets, bias = build_case(num_rows=0)
    weight.requires_grad_()
    logprobs, entropy = linear_log_prob(hidden, weight, targets, bias, with_entropy=True)
    assert logprobs.shape == entropy.shape == (0,)
    (gradient,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), weight)
    assert not gradient.any()


class LargestTensor(TorchDispatchMode):
    """Remembers how many elements the largest result of any operator had."""

    num_elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
        self.num_elements = max(self.num_elements, *sizes, 0)
        return results


@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("with_entropy", [False, True], ids=["logprobs", "entropy"])
def test_the_logits_never_exist_at_once(is_trained, with_entropy, monkeypatch):
    monkeypatch.setattr(linear_log_prob_tiles, "TILE_BYTES", 4 * N * 64)
    monkeypatch.setattr(linear_log_prob_tiles, "LEAST_COLUMNS", 1)
    monkeypatch.setattr(op, "KEPT_BYTES", 0)
    hidden, weight, targets, _ = build_case(has_bias=False)
    hidden.requires_grad_()
    weight.requires_grad_(is_trained)
    with LargestTensor() as largest:
        logprobs, entropy = linear_log_prob(hidden, weight, targets, with_entropy=with_entropy)
        (logprobs.sum() + (entropy.sum() if with_entropy else 0)).backward()
    assert largest.num_elements == max(N * 64, weight.numel() if is_trained else 0)


def shared_head(rank, world_size, trained, with_entropy):
    """What each process gets for its rows of a head, 200 and 101 of them."""
    torch.manual_seed(0)
    hidden, weight, targets, bias = build_case()
    rows = slice(0, 200) if rank == 0 else slice(200, V)
    share = vocabulary_share(dist.group.WORLD, rows.stop - rows.start)
    case = hidden, weight[rows], targets, bias[rows]
    return run(lambda *case: linear_log_prob(*case, SHAPES[2], with_entropy, share), case, trained, with_entropy)


@pytest.mark.parametrize("with_entropy", [False, True], ids=["logprobs", "entropy"])
@pytest.mark.parametrize("trained", [("hidden",), ("hidden", "weight", "bias")], ids="-".join)
def test_processes_that_hold_parts_of_the_head_get_what_one_gets(trained, with_entropy):
    expected = run(lambda *case: linear_log_prob(*case, SHAPES[2], with_entropy), build_case(), trained, with_entropy)
    found = run_distributed(shared_head, 2, trained, with_entropy)
    num_same = 2 + with_entropy  # log-probabilities, entropy, gradient of the hidden states
    for ours, theirs in zip(*(result[:num_same] for result in found), strict=True):
        assert torch.equal(ours, theirs)
    parts = [torch.cat(pair) for pair in zip(*(result[num_same:] for result in found), strict=True)]
    for ours, right in zip([*found[0][:num_same], *parts], expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


def test_what_is_kept_for_the_backward_pass_goes_with_it():
    hidden, weight = torch.randn(64, 32, requires_grad=True), torch.randn(5000, 32, requires_grad=True)
    with LiveBytes() as live:
        found = linear_log_prob(hidden, weight, torch.arange(64))
        loss = found.logprobs.sum()
        assert live.num_bytes > 4 * 64 * 5000
        loss.backward(retain_graph=True)
        assert live.num_bytes > 4 * 64 * 5000  # it may run again
        loss.backward()
        given = sum(tensor.nbytes for tensor in (hidden.grad, weight.grad, found.logprobs, loss))
        assert live.num_bytes == given


@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize(
    "shape", [PLAIN, LogitShape(scale=0.3, softcap=5.0, temperature=0.7)], ids=["plain", "softcap"]
)
@pytest.mark.parametrize("num_rows", [96, 700])
def test_pieces_take_the_bytes_that_are_said_of_them(is_trained, shape, num_rows, monkeypatch):
    monkeypatch.setattr(linear_log_prob_tiles, "TILE_BYTES", 4 * num_rows * 512)
    monkeypatch.setattr(op, "KEPT_BYTES", 3 * 2**20)
    hidden, weight = torch.randn(num_rows, 8, requires_grad=True), torch.randn(4000, 8, requires_grad=is_trained)
    said = piece_bytes(num_rows, 8, 4000, is_trained, "cpu", has_softcap=shape.softcap is not None)
    with LiveBytes() as live:
        loss = linear_log_prob(hidden, weight, torch.arange(num_rows), None, shape).logprobs.sum()
        assert live.num_bytes == pytest.approx(said.kept, rel=0.15, abs=4 * 16 * num_rows)
        loss.backward()
    gradients = hidden.nbytes + weight.nbytes * is_trained
    assert live.peak_bytes == pytest.approx(said.kept + said.tile + gradients, rel=0.15)


@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("used", ["logprobs", "entropy"])
def test_what_is_not_used_of_the_results_changes_no_gradient(used, is_trained):
    hidden, weight, targets, bias = build_case()
    found = []
    for others in (0.0, None):
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_(is_trained)
        result = linear_log_prob(*inputs, targets, bias, with_entropy=True)
        loss = getattr(result, used).square().sum()
        unused = result.entropy if used == "logprobs" else result.logprobs
        (loss if others is None else loss + others * unused.sum()).backward()
        found.append(torch.cat([one.grad.flatten() for one in inputs if one.grad is not None]))
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_cuda_partial_products_are_summed_in_fp32(dtype):
    """Of 16 bits none is rounded to them before; a CPU has no such product."""
    asked = []

    class Recorded(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.mm:
                asked.append((kwargs or {}).get("out_dtype"))
            return function(*args, **(kwargs or {}))

    with FakeTensorMode(), Recorded():
        left, right = (torch.empty(shape, dtype=dtype, device="cuda") for shape in ((5, 3), (3, 7)))
        sums = torch.empty(5, 7, device="cuda")
        linear_log_prob_tiles.add_product(sums, left, right)
        of_weight = _plus_product(None, left.t(), right, torch.empty(5, 7, dtype=dtype, device="cuda"))
    assert asked == [torch.float32] * 2 and of_weight.dtype == sums.dtype == torch.float32


def test_on_a_cpu_partial_products_keep_their_bits():
    left, right = torch.randn(5, 3).bfloat16(), torch.randn(3, 7).bfloat16()
    sums = torch.randn(5, 7)
    expected = sums + (left @ right)
    linear_log_prob_tiles.add_product(sums, left, right)
    assert torch.equal(sums, expected)
    assert torch.equal(_plus_product(None, left.t(), right, torch.empty(5, 7).bfloat16()), (left @ right).float())
