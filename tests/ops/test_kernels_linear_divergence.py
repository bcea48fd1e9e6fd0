"""The kernels of the divergence of two heads: as near to fp64 as torch on whole logits, whatever sizes and strides."""

import pytest
import torch
from torch.nn import functional

from hybrid_engine.ops import linear_divergence as op
from hybrid_engine.ops import linear_divergence_kernels as kernel_file
from hybrid_engine.ops.linear_divergence import HeadStates, linear_divergence
from hybrid_engine.ops.linear_log_prob_tiles import PLAIN, LogitShape

CAPPED = LogitShape(0.5, 3.0, 0.7)
BETAS = pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def build_case(device, dtype, num_rows, vocabulary, shapes, has_bias):
    """The student's hidden states, weight, bias and shape, and the teacher, of other width.

    The weights lie next to memory that must not be read.
    """
    generator = torch.Generator().manual_seed(0)
    sides = []
    for width, shape in zip((40, 24), shapes, strict=True):
        hidden = torch.randn(num_rows, width, generator=generator)
        weight = torch.full((vocabulary, width + 3), torch.nan)
        weight[:, :width] = torch.randn(vocabulary, width, generator=generator) * 2 / width**0.5
        bias = torch.randn(vocabulary, generator=generator) if has_bias else None
        tensors = [None if x is None else x.to(device, dtype) for x in (hidden, weight, bias)]
        sides.append(HeadStates(tensors[0], tensors[1][:, :width], tensors[2], shape))
    return sides


def logprobs_of(side):
    """Whole logits' log-probabilities, in the dtype of the tensors but for what follows the products: there fp32."""
    logits = functional.linear(side.hidden, side.weight, side.bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * side.shape.scale
    if side.shape.softcap is not None:
        logits = torch.tanh(logits / side.shape.softcap) * side.shape.softcap
    return (logits / side.shape.temperature).log_softmax(-1)


def on_whole_logits(student, teacher, beta):
    log_q, log_p = logprobs_of(student), logprobs_of(teacher)

    def kl(of, to):
        return functional.kl_div(to, of, reduction="none", log_target=True).sum(-1)

    if beta in (0, 1):
        return kl(log_p, log_q) if beta == 0 else kl(log_q, log_p)
    mixed = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    return beta * kl(log_p, mixed) + (1 - beta) * kl(log_q, mixed)


def in_tiles(student, teacher, beta):
    return linear_divergence(student.hidden, student.weight, teacher, beta, student.bias, student.shape)


def run(function, student, teacher, beta, dtype=None):
    """The divergences, and the gradients of a weighted sum of them by the student's tensors."""
    student, teacher = (
        HeadStates(*(x if x is None else x.detach().to(dtype or x.dtype) for x in side[:3]), side.shape)
        for side in (student, teacher)
    )
    leaves = [x.requires_grad_() for x in student[:3] if x is not None]
    values = function(student, teacher, beta)
    weights = torch.linspace(-1, 1, len(values), dtype=values.dtype, device=values.device)
    return [values, *torch.autograd.grad((weights * values).sum(), leaves)]


def compare(case, beta):
    """No further from fp64 than four times what torch on whole logits is, or a rounding of its size."""
    exact = run(on_whole_logits, *case, beta, torch.float64)
    for ours, theirs, right in zip(run(in_tiles, *case, beta), run(on_whole_logits, *case, beta), exact, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        error, allowed = (ours.double() - right).abs().max(), 4 * (theirs.double() - right).abs().max()
        assert error <= allowed + 4 * torch.finfo(ours.dtype).eps * right.abs().max()


@DTYPES
@BETAS
@pytest.mark.parametrize("shapes", [(PLAIN, PLAIN), (CAPPED, LogitShape(temperature=1.5))], ids=["plain", "shapes"])
def test_values_and_gradients_are_as_good_as_those_of_whole_logits(kernels, shapes, beta, dtype):
    compare(build_case(kernels, dtype, 19, 301, shapes, has_bias=shapes[0] is not PLAIN), beta)


@BETAS
@pytest.mark.parametrize(("num_rows", "vocabulary"), [(1, 2), (65, 130), (3, 2500)], ids=str)
def test_any_size(kernels, num_rows, vocabulary, beta):
    compare(build_case(kernels, torch.float32, num_rows, vocabulary, (PLAIN, CAPPED), has_bias=False), beta)


@BETAS
def test_runs_of_columns_and_parts_of_the_rows_are_put_together(kernels, monkeypatch, beta):
    monkeypatch.setattr(kernel_file, "LEAST_RUN", 64)
    monkeypatch.setattr(op, "ROWS_AT_ONCE", 20)
    compare(build_case(kernels, torch.float32, 45, 500, (PLAIN, PLAIN), has_bias=True), beta)


@BETAS
def test_the_kernels_run_and_a_frozen_head_gets_no_gradient(kernels, monkeypatch, beta):
    launched = []
    for name in ("partial_sums", "mixture_sums", "gradient_of_products"):
        function = getattr(kernel_file, name)
        monkeypatch.setattr(kernel_file, name, lambda *x, f=function, n=name: launched.append(n) or f(*x))
    student, teacher = build_case(kernels, torch.float32, 5, 301, (PLAIN, PLAIN), has_bias=False)
    exact = run(on_whole_logits, student, teacher, beta, torch.float64)
    student.hidden.requires_grad_()
    values = in_tiles(student, teacher, beta)
    weights = torch.linspace(-1, 1, len(values), device=values.device)
    (gradient,) = torch.autograd.grad((weights * values).sum(), [student.hidden])
    torch.testing.assert_close(gradient.double(), exact[1], atol=1e-5, rtol=1e-4)
    assert launched == ["partial_sums", *(["mixture_sums"] if 0 < beta < 1 else []), "gradient_of_products"]


@BETAS
def test_tokens_whose_bias_is_minus_infinity_on_both_sides_are_as_if_they_were_not_there(kernels, beta):
    student, teacher = build_case(kernels, torch.float32, 19, 301, (PLAIN, PLAIN), has_bias=True)
    first, last = (HeadStates(s.hidden, s.weight[100:], s.bias[100:]) for s in (student, teacher))
    for side in (student, teacher):
        side.bias[:100] = -torch.inf
    found, expected = run(in_tiles, student, teacher, beta), run(in_tiles, first, last, beta)
    torch.testing.assert_close(found[:2], expected[:2])
    for ours, theirs in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(ours[100:], theirs)
        assert not ours[:100].any()


@BETAS
def test_no_tokens_have_no_divergence(kernels, beta):
    values, *gradients = run(in_tiles, *build_case(kernels, torch.float32, 0, 50, (PLAIN, PLAIN), True), beta)
    assert values.shape == (0,) and not any(gradient.any() for gradient in gradients)
