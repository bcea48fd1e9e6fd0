"""Distance of sorted probabilities: literal values, the formula on whole logits, and few rows at a time."""

import pytest
import torch

from hybrid_engine.ops import linear_sorted_distance as module
from hybrid_engine.ops.linear_divergence import HeadStates
from hybrid_engine.ops.linear_log_prob_tiles import LogitShape
from hybrid_engine.ops.linear_sorted_distance import linear_sorted_distance, sorted_distance


def test_literal_values_and_the_shorter_vocabulary_is_filled_up():
    student = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.5, 0.3]])
    teacher = torch.tensor([[0.25, 0.25, 0.3, 0.2], [0.5, 0.2, 0.3, 0.0]])
    torch.testing.assert_close(sorted_distance(student, teacher), torch.tensor([0.3 + 0.05 + 0.15 + 0.2, 0.0]))


def states(num, size, vocabulary, seed, shape, with_bias):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(*sizes, generator=generator) for sizes in ((num, size), (vocabulary, size), (vocabulary,))]
    return HeadStates(made[0], made[1], made[2] if with_bias else None, shape)


@pytest.mark.parametrize("shape", [LogitShape(), LogitShape(0.5, 4.0, 0.7)])
@pytest.mark.parametrize(("own", "theirs"), [(100, 63), (63, 100), (1, 7)])
def test_value_and_gradients_are_those_of_whole_logits(monkeypatch, shape, own, theirs):
    monkeypatch.setattr(module, "BYTES_AT_ONCE", 4 * module.COPIES * 100 * 3)  # three rows at a time
    student = states(7, 16, own, 0, shape, with_bias=True)
    teacher = states(7, 24, theirs, 1, LogitShape(temperature=1.3), with_bias=False)
    scale, other_scale = (torch.rand(7, generator=torch.Generator().manual_seed(seed)) for seed in (2, 3))
    leaves = [x.double().requires_grad_() for x in (*student[:3], scale)]
    products = leaves[0] @ leaves[1].T + leaves[2]
    logits = products * shape.scale
    logits = logits if shape.softcap is None else shape.softcap * (logits / shape.softcap).tanh()
    q = (logits / shape.temperature).softmax(-1) * leaves[3][:, None]
    p = ((teacher.hidden @ teacher.weight.T).double() / 1.3).softmax(-1) * other_scale[:, None].double()
    width = max(own, theirs)
    both = [torch.cat([x, x.new_zeros(7, width - x.shape[1])], 1).sort(-1, descending=True).values for x in (q, p)]
    expected = (both[0] - both[1]).abs().sum(-1)
    weights = torch.linspace(-1, 1, 7)
    gradients = torch.autograd.grad((expected * weights).sum(), leaves)
    ours = [x.clone().requires_grad_() for x in (*student[:3], scale)]
    found = linear_sorted_distance(HeadStates(*ours[:3], shape), ours[3], teacher, other_scale)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    for made, wanted in zip(torch.autograd.grad((found * weights).sum(), ours), gradients, strict=True):
        torch.testing.assert_close(made.double(), wanted, atol=1e-6, rtol=1e-4)


def test_shapes_that_do_not_fit_are_refused():
    student, teacher = (states(3, 4, 5, seed, LogitShape(), with_bias=False) for seed in (0, 1))
    with pytest.raises(ValueError, match=r"scale"):
        linear_sorted_distance(student, torch.ones(2), teacher, torch.ones(3))
    with pytest.raises(ValueError, match=r"teacher.hidden"):
        linear_sorted_distance(student, torch.ones(3), teacher._replace(hidden=torch.ones(2, 4)), torch.ones(3))
