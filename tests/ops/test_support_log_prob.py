"""Log-probabilities over recorded supports, against a masked log-softmax of whole logits in fp64."""

import math

import numpy as np
import pytest
import torch

from hybrid_engine.metrics.memory import LiveBytes
from hybrid_engine.ops import support_log_prob as module
from hybrid_engine.ops.linear_log_prob_tiles import LogitShape
from hybrid_engine.ops.support_log_prob import OF_IDS, Supports, pack_support, read_records, support_log_prob

pytestmark = pytest.mark.quick

N, E, V = 7, 5, 1100


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Several parts of the rows, and several tiles of the union of their supports."""
    torch.manual_seed(0)
    monkeypatch.setattr(module, "TILE_BYTES", 4 * 2000)
    monkeypatch.setattr(module, "tile_width", lambda rows, is_on_gpu: 13)


def draw_kept(sizes):
    """`[N, V]` bool with so many tokens in each row."""
    kept = torch.zeros(len(sizes), V, dtype=torch.bool)
    for row, size in enumerate(sizes):
        kept[row, torch.randperm(V)[:size]] = True
    return kept


def supports_of(kept):
    records = read_records(pack_support(torch.where(kept, 0.0, -torch.inf)).numpy())
    return Supports.of([records])[0]


def draw(sizes=(1, 2, 3, 40, V, 500, 7), dtype=torch.float32, has_bias=True):
    kept = draw_kept(sizes)
    targets = torch.stack([row.nonzero().flatten()[torch.randint(int(row.sum()), ())] for row in kept])
    own = [torch.randn(len(sizes), E), torch.randn(V, E), torch.randn(V)]
    own = [(tensor / 2).to(dtype).requires_grad_() for tensor in own]
    return own if has_bias else own[:2], targets, kept


@pytest.mark.parametrize(
    "shape", [LogitShape(), LogitShape(0.5, 3.0, 0.7)], ids=["plain", "scale, softcap, temperature"]
)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_are_those_of_a_masked_softmax(shape, has_bias, with_entropy):
    own, targets, kept = draw(has_bias=has_bias)
    hidden, weight, *bias = own
    found = support_log_prob(hidden, weight, targets, supports_of(kept), *bias, shape=shape, with_entropy=with_entropy)
    exact = [tensor.detach().double().requires_grad_() for tensor in own]
    logits = exact[0] @ exact[1].t() + (exact[2] if has_bias else 0)
    if shape.softcap is not None:
        logits = (logits * shape.scale / shape.softcap).tanh() * shape.softcap / shape.temperature
    logprobs = logits.masked_fill(~kept, -1e9).log_softmax(-1)  # whose exp is 0 in fp64 too
    expected = [logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(1)][
        : 1 + with_entropy
    ]
    assert found.entropy is None or with_entropy
    above = torch.randn(2, N)[: 1 + with_entropy]
    for ours, exactly in zip(found, expected, strict=False):
        torch.testing.assert_close(ours.double(), exactly, atol=1e-5, rtol=1e-5)
    losses = ((sum(a * x for a, x in zip(above, given, strict=False))).sum() for given in (found, expected))
    gradients = (torch.autograd.grad(loss, of) for loss, of in zip(losses, (own, exact), strict=True))
    for ours, exactly in zip(*gradients, strict=True):
        torch.testing.assert_close(ours.double(), exactly, atol=1e-5, rtol=1e-4)


def test_over_all_tokens_it_is_the_unfiltered_log_probability():
    (hidden, weight, bias), targets, _ = draw(sizes=(V,) * 3)
    found = support_log_prob(hidden, weight, targets, supports_of(torch.ones(3, V, dtype=torch.bool)), bias)
    expected = (hidden.double() @ weight.double().t() + bias.double()).log_softmax(-1)
    torch.testing.assert_close(found.logprobs.double(), expected.gather(1, targets[:, None]).squeeze(1))


def test_neither_the_logits_nor_a_mask_of_their_size_exist():
    num_tokens, vocab = 256, 20000
    hidden, weight = torch.randn(num_tokens, E, requires_grad=True), torch.randn(vocab, E, requires_grad=True)
    records = [OF_IDS + np.sort(np.random.default_rng(row).choice(vocab, 50, replace=False)).astype("<i4").tobytes()
               for row in range(num_tokens)]  # fmt: skip
    supports = Supports.of([records])[0]
    targets = torch.from_numpy(supports.cells()[1][::50].copy())
    with LiveBytes() as live:
        support_log_prob(hidden, weight, targets, supports).logprobs.sum().backward()
    assert live.peak_bytes < num_tokens * vocab / 4  # of a mask's bytes; the weight's gradient is a twelfth of them
    assert weight.grad.nonzero()[:, 0].unique().tolist() == sorted(set(supports.cells()[1].tolist()))


def test_in_16_bits_gradients_have_their_dtype_and_a_frozen_head_gets_none():
    own, targets, kept = draw(dtype=torch.bfloat16)
    own[1].requires_grad_(False)
    found = support_log_prob(*own[:2], targets, supports_of(kept), own[2]).logprobs
    expected = (own[0].double() @ own[1].double().t() + own[2].double()).masked_fill(~kept, -torch.inf).log_softmax(-1)
    torch.testing.assert_close(found.double(), expected.gather(1, targets[:, None]).squeeze(1), atol=0.05, rtol=0.02)
    found.sum().backward()
    assert own[0].grad.dtype == own[2].grad.dtype == torch.bfloat16 and own[1].grad is None


def test_a_token_without_probability_has_a_finite_log_probability_that_says_so():
    """The first token's whole support has none, of the second only the token itself."""
    bias = torch.zeros(V)
    bias[:10] = -torch.inf
    kept = torch.arange(V) < torch.tensor([[10], [20]])
    targets, hidden, weight = torch.tensor([4, 4]), torch.randn(2, E), torch.randn(V, E)
    found = support_log_prob(hidden, weight, targets, supports_of(kept), bias, with_entropy=True)
    assert found.logprobs.tolist() == [pytest.approx(-1e30), pytest.approx(-1e30)]
    assert found.entropy.isfinite().all()
    kl = torch.tensor([-1.0, -1.0]) - found.logprobs  # of a policy that drew the token: k1
    assert kl.isfinite().all() and (kl > 1e29).all()


def test_records_keep_every_token_of_a_support_in_the_fewer_bytes():
    sizes = (1, 5, V // 32, V // 32 + 1, V)
    kept = draw_kept(sizes)
    packed = pack_support(torch.where(kept, torch.randn(5, V), -torch.inf)).numpy()
    assert np.array_equal(packed, np.packbits(kept.numpy(), axis=1, bitorder="little"))
    records = read_records(packed)
    num_bits = math.ceil(V / 8)
    assert [len(record) for record in records] == [1 + min(4 * size, num_bits) for size in sizes]
    supports = Supports.of([records, records[:2]])
    assert supports.lengths.shape == (2, 5) and supports.sizes.tolist() == [list(sizes), [1, 5, 0, 0, 0]]
    assert torch.equal(supports[0].mask(V, torch.device("cpu")), kept)
    assert Supports.of_texts([supports[0].texts(), supports[1, :2].texts()]).sizes.tolist() == supports.sizes.tolist()
    joined = Supports.join([supports[1:, :2], Supports.of([records[4:]]), supports[:1]])
    assert joined.sizes.tolist() == [[1, 5, 0, 0, 0], [V, 0, 0, 0, 0], list(sizes)]
    assert torch.equal(joined[2].mask(V, torch.device("cpu")), kept)
    assert joined.records.nbytes == supports.records.nbytes + len(records[4])  # shared records are there once


def test_what_does_not_fit_is_refused():
    (hidden, weight, _), targets, kept = draw()
    supports = supports_of(kept)
    outside = int((~kept[0]).nonzero()[0])
    for wrong, message in (
        ((hidden, weight, targets.index_fill(0, torch.tensor([0]), outside), supports), "is not in its support"),
        ((hidden, weight, targets, supports[:3]), r"supports has shape \[3\]; expected \[7\]"),
        ((hidden, weight[:1000], targets.clamp(max=999), supports), r"expected tokens in \[0, 1000\)"),
        ((hidden, weight, targets, Supports.of([[b""] * N])[0]), "lacks the record of a token"),
    ):
        with pytest.raises(ValueError, match=message):
            support_log_prob(*wrong)
    assert support_log_prob(hidden[:0], weight, targets[:0], supports[:0]).logprobs.shape == (0,)
