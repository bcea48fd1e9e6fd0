"""The divergence of two heads' distributions, in tiles, against TRL's function of whole logits in fp64."""

from itertools import pairwise

import pytest
import torch
from trl.experimental.gkd import GKDTrainer

from hybrid_engine.ops import linear_divergence as module
from hybrid_engine.ops import linear_log_prob_tiles
from hybrid_engine.ops.linear_divergence import (
    HeadStates,
    TopTokens,
    divergence,
    linear_divergence,
    linear_top_divergence,
    top_divergence,
    top_tokens,
)
from hybrid_engine.ops.linear_log_prob_tiles import LogitShape

BETAS = pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
N, E, F, V = 7, 5, 6, 1100


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Five tiles of the vocabulary, and rows in two parts."""
    torch.manual_seed(0)
    monkeypatch.setattr(linear_log_prob_tiles, "TILE_BYTES", 1)
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 4)


def draw(dtype=torch.float32, has_bias=True):
    """Hidden states, head and bias of the student, which are differentiable, and the teacher."""
    own = [torch.randn(N, E), torch.randn(V, E), torch.randn(V)]
    own = [(tensor / 2).to(dtype).requires_grad_() for tensor in own]
    return own if has_bias else own[:2], HeadStates(
        (torch.randn(N, F) / 2).to(dtype), (torch.randn(V, F) / 2).to(dtype)
    )


def logits_of(hidden, weight, bias, shape):
    return shape.apply_(hidden @ weight.t() + (0 if bias is None else bias))


def trls(student, teacher, beta):
    """`[N]`."""
    rows = zip(student.split(1), teacher.split(1), strict=True)
    return torch.stack([GKDTrainer.generalized_jsd_loss(*row, beta=beta, reduction="sum") for row in rows])


@BETAS
@pytest.mark.parametrize(
    "shape", [LogitShape(), LogitShape(0.5, 3.0, 0.7)], ids=["plain", "scale, softcap, temperature"]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_are_those_of_trl_on_whole_logits(beta, shape, has_bias):
    own, teacher = draw(has_bias=has_bias)
    teacher = teacher._replace(shape=LogitShape(temperature=1.5))
    hidden, weight, *bias = own
    found = linear_divergence(hidden, weight, teacher, beta, *bias, shape=shape)
    exact = [tensor.detach().double().requires_grad_() for tensor in own]
    theirs = logits_of(teacher.hidden.double(), teacher.weight.double(), None, teacher.shape)
    student = exact[0] @ exact[1].t() + (exact[2] if has_bias else 0)
    if shape.softcap is not None:
        student = (student * shape.scale / shape.softcap).tanh() * shape.softcap / shape.temperature
    expected = trls(student, theirs, beta)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    above = torch.randn(N)
    gradients = torch.autograd.grad((found * above).sum(), own)
    for ours, exactly in zip(gradients, torch.autograd.grad((expected * above.double()).sum(), exact), strict=True):
        torch.testing.assert_close(ours.double(), exactly, atol=1e-5, rtol=1e-4)


@BETAS
def test_the_function_of_log_probabilities_is_trls_too(beta):
    student, teacher = torch.randn(3, 4, 50, dtype=torch.float64), torch.randn(3, 4, 50, dtype=torch.float64)
    found = divergence(student.log_softmax(-1), teacher.log_softmax(-1), beta)
    torch.testing.assert_close(found.flatten(), trls(student.flatten(0, 1), teacher.flatten(0, 1), beta))


@BETAS
def test_in_16_bits_it_is_as_near_to_the_exact_value_as_the_logits_are(beta):
    own, teacher = draw(torch.bfloat16)
    found = linear_divergence(own[0], own[1], teacher, beta, own[2])
    rounded = [logits_of(*part, LogitShape()) for part in (own, (teacher.hidden, teacher.weight, None))]
    exact = [logits_of(*(x if x is None else x.double() for x in part), LogitShape())
             for part in (own, (teacher.hidden, teacher.weight, None))]  # fmt: skip
    of_logits = (trls(rounded[0].double(), rounded[1].double(), beta) - trls(*exact, beta)).abs().max()
    assert (found - trls(*exact, beta)).abs().max() <= 2 * of_logits + 1e-3
    assert [x.dtype for x in torch.autograd.grad(found.sum(), own)] == [torch.bfloat16] * 3


@BETAS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [LogitShape(), LogitShape(0.5, 3.0, 0.7)], ids=["plain", "softcap"])
def test_a_frozen_head_has_the_gradient_of_a_trained_one(beta, dtype, shape):
    """Whose bias leaves out the first tile, and whose logits rise far above it later."""
    own, teacher = draw(dtype)
    with torch.no_grad():
        own[2][:300] = -torch.inf
        own[2][700:] += 60
    above = torch.randn(N)
    trained = linear_divergence(*own[:2], teacher, beta, own[2], shape)
    expected = torch.autograd.grad((trained * above).sum(), own)[0]
    frozen = linear_divergence(own[0], own[1].detach(), teacher, beta, own[2].detach(), shape)
    torch.testing.assert_close(frozen, trained)
    (found,) = torch.autograd.grad((frozen * above).sum(), own[:1])
    near = 1e-4 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(found, expected, rtol=near, atol=near * expected.abs().max().item())


@BETAS
def test_no_tokens_have_no_divergence(beta):
    own, teacher = draw()
    for is_trained in (True, False):
        weight = own[1].detach().requires_grad_(is_trained)
        hidden = own[0][:0].detach().requires_grad_()
        found = linear_divergence(hidden, weight, teacher._replace(hidden=teacher.hidden[:0]), beta)
        gradients = torch.autograd.grad(found.sum(), [hidden, *([weight] if is_trained else [])])
        assert found.shape == (0,) and not any(gradient.any() for gradient in gradients)


def test_it_is_zero_for_the_teacher_itself_and_positive_elsewhere():
    own, teacher = draw(has_bias=False)
    for beta in (0.0, 0.5, 1.0):
        same = linear_divergence(*own, HeadStates(own[0].detach(), own[1].detach()), beta)
        torch.testing.assert_close(same, torch.zeros(N), atol=1e-6, rtol=0)
        assert linear_divergence(*own, teacher, beta).min() > 0.01


def test_what_does_not_fit_is_named():
    own, teacher = draw(has_bias=False)
    for beta in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"beta=.* must be between 0"):
            linear_divergence(*own, teacher, beta)
    with pytest.raises(ValueError, match=r"teacher.weight has shape \[1099, 6\]"):
        linear_divergence(*own, teacher._replace(weight=teacher.weight[:-1]), 1.0)
    with pytest.raises(ValueError, match=r"teacher.bias has shape \[3\]"):
        linear_divergence(*own, teacher._replace(bias=torch.zeros(3)), 1.0)
    with pytest.raises(ValueError, match=r"teacher.hidden has shape \[6, 6\]"):
        linear_divergence(*own, teacher._replace(hidden=teacher.hidden[:-1]), 1.0)


def plain_top(student, teacher, num_top, beta):
    """`[N]`: the divergence of whole probabilities, of which all but the teacher's top ones are added up."""

    def classes(probs):
        chosen = probs.gather(1, teacher.topk(num_top).indices)
        return torch.cat([chosen, 1 - chosen.sum(1, keepdim=True)], dim=1)

    q, p = classes(student.softmax(1)), classes(teacher.softmax(1))
    if beta in (0, 1):
        first, second = (p, q) if beta == 0 else (q, p)
        return (first * (first / second).log()).sum(1)
    m = beta * p + (1 - beta) * q
    return beta * (p * (p / m).log()).sum(1) + (1 - beta) * (q * (q / m).log()).sum(1)


@BETAS
@pytest.mark.parametrize("num_top", [1, 20, 300])
@pytest.mark.parametrize("shape", [LogitShape(), LogitShape(0.5, 3.0, 0.7)], ids=["plain", "softcap"])
def test_top_tokens_and_the_rest_have_the_divergence_of_whole_probabilities(beta, num_top, shape):
    own, teacher = draw()
    found = linear_top_divergence(*own[:2], top_tokens(teacher, num_top), beta, own[2], shape)
    exact = [tensor.detach().double().requires_grad_() for tensor in own]
    student = exact[0] @ exact[1].t() + exact[2]
    if shape.softcap is not None:
        student = (student * shape.scale / shape.softcap).tanh() * shape.softcap / shape.temperature
    theirs = teacher.hidden.double() @ teacher.weight.double().t()
    expected = plain_top(student, theirs, num_top, beta)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    in_memory = theirs.log_softmax(1).topk(num_top)
    of_memory = top_divergence(student.log_softmax(1), TopTokens(in_memory.indices, in_memory.values), beta)
    torch.testing.assert_close(of_memory, expected)
    above = torch.randn(N)
    gradients = torch.autograd.grad((found * above).sum(), own)
    for values in (expected, of_memory):
        theirs = torch.autograd.grad((values * above.double()).sum(), exact, retain_graph=True)
        for ours, exactly in zip(gradients, theirs, strict=True):
            torch.testing.assert_close(ours.double(), exactly, atol=1e-5, rtol=1e-4)


@BETAS
def test_all_tokens_as_top_tokens_give_the_whole_divergence_and_fewer_a_lower_one(beta):
    own, teacher = draw()
    whole = linear_divergence(*own[:2], teacher, beta, own[2])
    found = [linear_top_divergence(*own[:2], top_tokens(teacher, k), beta, own[2]) for k in (1, 10, 100, V, V + 3)]
    for same in found[3:]:
        torch.testing.assert_close(same, whole, atol=1e-6, rtol=1e-5)
    for fewer, more in pairwise(found[:4]):
        assert (fewer <= more + 1e-6).all()
    gradients = (torch.autograd.grad(value.sum(), own) for value in (found[4], whole))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


@BETAS
def test_unknown_tokens_belong_to_the_rest_wherever_they_stand(beta):
    own, teacher = draw()
    top = top_tokens(teacher, 8)
    fewer = TopTokens(top.ids[:, :5], top.logprobs[:, :5])
    is_known = torch.arange(8) < 5
    order = torch.randperm(8)
    unknown = torch.where(torch.arange(8) < 7, -1, V + 5)
    ids, logprobs = (
        torch.where(is_known, top.ids, unknown)[:, order],
        torch.where(is_known, top.logprobs, 3.0)[:, order],
    )
    expected = linear_top_divergence(*own[:2], fewer, beta, own[2])
    torch.testing.assert_close(linear_top_divergence(*own[:2], TopTokens(ids, logprobs), beta, own[2]), expected)
    whole = (own[0] @ own[1].t() + own[2]).log_softmax(1)
    torch.testing.assert_close(top_divergence(whole, TopTokens(ids, logprobs), beta), expected, atol=1e-5, rtol=1e-5)


def test_a_rest_of_small_probability_keeps_its_digits():
    """The student's rest is 1e-9 of all: 1 minus the others would be 0 in fp32."""
    logits = torch.zeros(1, V)
    logits[0, :2] = 27.7
    weight, hidden = logits.t().clone().requires_grad_(), torch.ones(1, 1)
    top = TopTokens(torch.tensor([[0, 1]]), torch.tensor([[0.3, 0.3]]).log())
    found = linear_top_divergence(hidden, weight, top, 0.0)
    q = logits.double().softmax(1)
    expected = 2 * 0.3 * (0.3 / q[0, 0]).log() + 0.4 * (0.4 / q[0, 2:].sum()).log()
    torch.testing.assert_close(found.double(), expected[None], rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(found.sum(), weight)
    torch.testing.assert_close(gradient[2:].sum(), torch.tensor(-0.4), rtol=1e-5, atol=0)
