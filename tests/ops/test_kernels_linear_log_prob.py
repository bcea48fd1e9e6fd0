"""The kernels of log-probabilities without logits: equal to the torch tiles, whatever the sizes and strides."""

import pytest
import torch

from hybrid_engine.ops import linear_log_prob as op
from hybrid_engine.ops import linear_log_prob_kernels as kernel_file
from hybrid_engine.ops.linear_log_prob import linear_log_prob
from tests.ops.test_linear_log_prob import SHAPES, compare, compare_without, run

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def build_case(device, dtype, num_rows, width, vocabulary, has_bias=True):
    """Weights that are neighbours of what must not be read, and logits of some size."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, width, generator=generator)
    weight = torch.full((vocabulary, width + 3), torch.nan)
    weight[:, :width] = torch.randn(vocabulary, width, generator=generator) * 2 / width**0.5
    bias = torch.randn(vocabulary, generator=generator) if has_bias else None
    targets = torch.randint(vocabulary, (num_rows,), generator=generator).to(device)
    hidden, weight, bias = (None if x is None else x.to(device, dtype) for x in (hidden, weight, bias))
    return hidden, weight[:, :width], targets, bias


@DTYPES
@pytest.mark.parametrize("with_entropy", [False, True], ids=["logprobs", "entropy"])
@pytest.mark.parametrize("shape", SHAPES, ids=["plain", "temperature", "capped"])
def test_values_and_gradients_are_as_good_as_those_of_the_logits(kernels, shape, with_entropy, dtype):
    case = build_case(kernels, dtype, 19, 40, 301)
    trained = ("hidden", "weight", "bias") if with_entropy else ("hidden",)
    compare(case, shape, with_entropy, trained)


@pytest.mark.parametrize(("num_rows", "width", "vocabulary"), [(1, 1, 1), (65, 63, 130), (3, 100, 2500)], ids=str)
def test_any_size(kernels, num_rows, width, vocabulary):
    case = build_case(kernels, torch.float32, num_rows, width, vocabulary, has_bias=False)
    compare(case, SHAPES[0], False, ("hidden", "weight"))


def test_runs_of_columns_and_parts_of_the_rows_are_put_together(kernels, monkeypatch):
    monkeypatch.setattr(kernel_file, "LEAST_RUN", 64)
    monkeypatch.setattr(op, "ROWS_AT_ONCE", 20)
    case = build_case(kernels, torch.float32, 45, 24, 500)
    sums = kernel_file.partial_sums(case[0], op.Head(case[1], case[3], SHAPES[0]), case[2], True)
    assert sums.base.shape == (8, 45)
    compare(case, SHAPES[0], True, ("hidden", "weight"))


def test_a_logit_far_above_those_of_earlier_tiles_is_no_overflow(kernels):
    hidden, weight, targets, _ = build_case(kernels, torch.float32, 5, 24, 301, has_bias=False)
    hidden, weight = hidden.round(), (3 * weight).round()  # logits of thousands are exact then, in whatever order
    weight[297] = 400 * hidden[0]
    weight[299] = -400 * hidden[0]
    compare((hidden, weight, targets, None), SHAPES[0], False, ("hidden",))


@DTYPES
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("ruled_out", [range(150), range(40, 301)], ids=["first", "last"])
def test_tokens_whose_bias_is_minus_infinity_are_as_if_they_were_not_there(kernels, ruled_out, with_entropy, dtype):
    compare_without(ruled_out, build_case(kernels, dtype, 19, 40, 301), SHAPES[0], with_entropy)


def test_no_rows_give_no_log_probabilities(kernels):
    hidden, weight, targets, bias = build_case(kernels, torch.float32, 0, 24, 50)
    logprobs, entropy, gradient = run(
        lambda *case: linear_log_prob(*case, with_entropy=True), (hidden, weight, targets, bias), ("weight",), True
    )
    assert logprobs.shape == entropy.shape == (0,) and not gradient.any()
