"""Distance of a student's sorted probabilities from a teacher's, whose vocabulary may be another one.

    D = sum_i |a q_(i) - b p_(i)|        q: student, p: teacher, x_(i): the i-th largest entry of x

The shorter of the two vocabularies is filled up with zeros. With a = b = 1 this is the Wasserstein distance with equal
costs of Boizard et al. 2024 ("Universal Logit Distillation", arXiv:2402.12030, section 3.2); a and b weigh a place by
the probability of the tokens before it, where several tokens on one side stand for one on the other. With
s_v = sign(a q_v - b p_(rank of v))

    dD / d logit_v = a q_v (s_v - sum_u q_u s_u)        dD / da = sum_v q_v s_v

Sorting needs whole rows, so the logits of a few rows at a time exist, forward and backward. The teacher is frozen.

N places, V and U the vocabularies of student and teacher, E and F their hidden sizes.
"""

from collections.abc import Iterator

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from hybrid_engine.ops.dispatch import check_tensor
from hybrid_engine.ops.linear_divergence import HeadStates
from hybrid_engine.ops.linear_log_prob_tiles import Head, add_product, product_fp32

__all__ = ["linear_sorted_distance", "sorted_distance"]

BYTES_AT_ONCE = 2**27
"""Bytes of the fp32 logits, sorted copies and indices of a few rows."""
COPIES = 8
"""Number of those tensors that exist at once."""


def linear_sorted_distance(
    student: HeadStates, scale: torch.Tensor, teacher: HeadStates, teacher_scale: torch.Tensor
) -> torch.Tensor:
    """Returns `[N]` fp32, the distance at each place.

    Differentiable in hidden states, weight and bias of the student and in `scale`; a second derivative is an error.

    Args:
        student: hidden states `[N, E]` and head `[V, E]`.
        scale: `[N]` fp32, a.
        teacher: hidden states `[N, F]` and head `[U, F]`.
        teacher_scale: `[N]` fp32, b.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    for name, states in (("student", student), ("teacher", teacher)):
        states.shape.check()
        check_tensor(f"{name}.hidden", states.hidden, shape=(len(student.hidden), None))
        check_tensor(f"{name}.weight", states.weight, like=states.hidden, shape=(None, states.hidden.shape[1]))
    for name, factors in (("scale", scale), ("teacher_scale", teacher_scale)):
        check_tensor(name, factors, shape=(len(student.hidden),))
    with torch.autocast(student.hidden.device.type, enabled=False):
        return _SortedDistance.apply(
            student.hidden, student.weight, student.bias, scale, student.shape, teacher, teacher_scale
        )


def sorted_distance(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Returns `[...]`, the same of scaled probabilities `[..., V]` and `[..., U]` that are in memory."""
    width = max(student.shape[-1], teacher.shape[-1])
    parts = (pad(x.sort(-1, descending=True).values, (0, width - x.shape[-1])) for x in (student, teacher))
    return torch.stack(list(parts)).diff(dim=0).abs().sum(-1).squeeze(0)


class _SortedDistance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, scale, shape, teacher, teacher_scale):
        student = HeadStates(hidden, weight, bias, shape)
        ctx.shapes = (shape, teacher.shape)
        ctx.save_for_backward(hidden, weight, bias, scale, *teacher[:3], teacher_scale)
        distances = [
            sorted_distance(q * scale[rows, None], p * teacher_scale[rows, None])
            for rows, q, p in _probabilities(student, teacher)
        ]
        return torch.cat(distances) if distances else hidden.new_zeros(0, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx, above):
        hidden, weight, bias, scale, *theirs, teacher_scale = ctx.saved_tensors
        student = HeadStates(hidden, weight, bias, ctx.shapes[0])
        teacher = HeadStates(theirs[0], theirs[1], theirs[2], ctx.shapes[1])
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(x, dtype=torch.float32) if x is not None and needed else None
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        of_scale = torch.zeros_like(scale)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, q, p in _probabilities(student, teacher):
                signs = _signs(q * scale[rows, None], p * teacher_scale[rows, None])
                mean = torch.linalg.vecdot(q, signs)
                of_scale[rows] = mean * above[rows]
                of_products = signs.sub_(mean[:, None]).mul_(q).mul_((above[rows] * scale[rows])[:, None])
                if student.shape.softcap is not None:
                    logits = Head(weight, bias, student.shape).logits(hidden[rows])
                    of_products.mul_(student.shape.slope(logits))
                else:
                    of_products.mul_(student.shape.scale / student.shape.temperature)
                of_products = of_products.to(weight.dtype)
                if of_hidden is not None:
                    add_product(of_hidden[rows], of_products, weight)
                if of_weight is not None:
                    of_weight += product_fp32(of_products.t(), hidden[rows])
                if of_bias is not None:
                    of_bias += of_products.sum(0, dtype=torch.float32)
        made = zip((of_hidden, of_weight, of_bias), (hidden, weight, bias), strict=True)
        return (*(None if x is None else x.to(like.dtype) for x, like in made), of_scale, None, None, None)


def _probabilities(student: HeadStates, teacher: HeadStates) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Some rows at a time, with both distributions, `[rows, V]` and `[rows, U]` fp32."""
    num_rows = max(1, BYTES_AT_ONCE // (4 * COPIES * max(len(student.weight), len(teacher.weight))))
    for first in range(0, len(student.hidden), num_rows):
        rows = slice(first, first + num_rows)
        heads = (Head(states.weight, states.bias, states.shape) for states in (student, teacher))
        hidden = (states.hidden[rows] for states in (student, teacher))
        q, p = (head.logits(part).softmax(-1) for head, part in zip(heads, hidden, strict=True))
        yield rows, q, p


def _signs(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """`[rows, V]`: the sign of each entry of the student less the teacher's entry of the same rank."""
    values, places = student.sort(-1, descending=True)
    others = teacher.sort(-1, descending=True).values[:, : values.shape[1]]
    signs = (values - pad(others, (0, values.shape[1] - others.shape[1]))).sign_()
    return torch.empty_like(signs).scatter_(1, places, signs)
