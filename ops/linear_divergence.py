"""Divergence of a student's distribution over tokens from a teacher's, from hidden states and both heads.

    forward KL, beta = 0:    D = sum_v p_v log(p_v / q_v)               p: teacher, q: student
    reverse KL, beta = 1:    D = sum_v q_v log(q_v / p_v)
    otherwise:               D = beta KL(p || m) + (1 - beta) KL(q || m)        m = beta p + (1 - beta) q

The generalized Jensen-Shannon divergence of Agarwal et al. 2023 (GKD, arXiv:2306.13649, equation 1); beta is that of
TRL's GKD trainer. With logit_v of the student and g_v = dD / dq_v

    dD / d logit_v = q_v (g_v - sum_u q_u g_u)        g_v = -p_v / q_v,  log(q_v / p_v) + 1,  (1 - beta) log(q_v / m_v)

Neither head's `[N, V]` logits ever exist: both are computed in the same tiles of the vocabulary, once for the two
KLs, whose sums over p and q are kept with a running maximum, and twice for a mixture, which needs both normalizers
first. The backward pass computes the tiles again. The teacher is frozen.

N tokens, V vocabulary, E and F the hidden sizes of student and teacher.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from hybrid_engine.ops.dispatch import check_tensor
from hybrid_engine.ops.linear_log_prob_tiles import PLAIN, Head, LogitShape, add_product, product_fp32, tile_width

__all__ = ["Teacher", "divergence", "linear_divergence"]

ROWS_AT_ONCE = 2048


class Teacher(NamedTuple):
    """A teacher's hidden states of the same tokens, and its head."""

    hidden: torch.Tensor
    """`[N, F]`."""
    weight: torch.Tensor
    """`[V, F]`."""
    bias: torch.Tensor | None = None
    """`[V]`."""
    shape: LogitShape = PLAIN
    """Temperature, scale and softcap of its logits."""


def linear_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: Teacher,
    beta: float,
    bias: torch.Tensor | None = None,
    shape: LogitShape = PLAIN,
) -> torch.Tensor:
    """Returns `[N]` fp32, the divergence of each token's two distributions, in nats.

    Differentiable in hidden, weight and bias; a second derivative is an error.

    Args:
        hidden: `[N, E]`, any float dtype.
        weight: `[V, E]`, the student's head, of the same dtype.
        teacher: the same tokens and the same vocabulary.
        beta: 0 is the forward KL, 1 the reverse KL, values between them weigh the teacher's KL to the mixture.
        bias: `[V]`, of the student's head.
        shape: temperature, scale and softcap of the student's logits.

    Raises:
        ValueError: beta is not between 0 and 1, or shapes, dtypes or devices do not fit.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta} must be between 0 (forward KL) and 1 (reverse KL)")
    shape.check()
    teacher.shape.check()
    check_tensor("hidden", hidden, shape=(None, None))
    check_tensor("weight", weight, like=hidden, shape=(None, hidden.shape[1]))
    if bias is not None:
        check_tensor("bias", bias, like=hidden, shape=(len(weight),))
    if teacher.bias is not None:
        check_tensor("teacher.bias", teacher.bias, like=teacher.hidden, shape=(len(weight),))
    check_tensor("teacher.hidden", teacher.hidden, shape=(len(hidden), None))
    check_tensor("teacher.weight", teacher.weight, like=teacher.hidden, shape=(len(weight), teacher.hidden.shape[1]))
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearDivergence.apply(hidden, weight, bias, teacher, beta, shape)


def divergence(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """Returns `[...]`, the same of log-probabilities `[..., V]` that are in memory; differentiable in both."""
    if beta == 0:
        return (teacher.exp() * (teacher - student)).sum(-1)
    if beta == 1:
        return (student.exp() * (student - teacher)).sum(-1)
    mixture = _log_mixture(student, teacher, beta)
    of_teacher = (teacher.exp() * (teacher - mixture)).sum(-1)
    return beta * of_teacher + (1 - beta) * (student.exp() * (student - mixture)).sum(-1)


class _Totals(NamedTuple):
    """Sums over the whole vocabulary, `[N]` fp32 each."""

    student: torch.Tensor
    """logsumexp of the student's logits."""
    teacher: torch.Tensor
    divergence: torch.Tensor
    slope: torch.Tensor
    """sum_u q_u g_u."""


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, teacher, beta, shape):
        student, taught = Head(weight, bias, shape), Head(teacher.weight, teacher.bias, teacher.shape)
        parts = [
            _totals(own, theirs, student, taught, beta)
            for own, theirs in zip(hidden.split(ROWS_AT_ONCE), teacher.hidden.split(ROWS_AT_ONCE), strict=True)
        ]
        totals = _Totals(*(torch.cat(part) for part in zip(*parts, strict=True)))
        ctx.beta, ctx.shapes = beta, (shape, teacher.shape)
        ctx.save_for_backward(hidden, weight, bias, *teacher[:3], *totals)
        return totals.divergence

    @staticmethod
    @once_differentiable
    def backward(ctx, above):
        hidden, weight, bias, *theirs = ctx.saved_tensors
        (taught_hidden, taught_weight, taught_bias), totals = theirs[:3], _Totals(*theirs[3:])
        student = Head(weight, bias, ctx.shapes[0])
        taught = Head(taught_weight, taught_bias, ctx.shapes[1])
        needs = ctx.needs_input_grad
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs[0] else None
        of_weight, of_bias = (
            torch.zeros_like(x, dtype=torch.float32) if needed else None
            for x, needed in zip((weight, bias), needs[1:3], strict=True)
        )
        with torch.autocast(hidden.device.type, enabled=False):
            for columns, own, other in _tiles(student, taught, min(len(hidden), ROWS_AT_ONCE)):
                for first in range(0, len(hidden), ROWS_AT_ONCE):
                    rows = slice(first, first + ROWS_AT_ONCE)
                    found = _Totals(*(part[rows] for part in totals))
                    of_products = _gradient(own, other, hidden[rows], taught_hidden[rows], found, ctx.beta)
                    of_products = of_products.mul_(above[rows, None]).to(weight.dtype)
                    if of_hidden is not None:
                        add_product(of_hidden[rows], of_products, own.weight)
                    if of_weight is not None:
                        of_weight[columns] += product_fp32(of_products.t(), hidden[rows])
                    if of_bias is not None:
                        of_bias[columns] += of_products.sum(0, dtype=torch.float32)
                    del of_products  # before the next tile is computed
        gradients = zip((of_hidden, of_weight, of_bias), (hidden, weight, bias), strict=True)
        return (*(None if made is None else made.to(x.dtype) for made, x in gradients), None, None, None)


def _tiles(student: Head, teacher: Head, num_rows: int) -> Iterator[tuple[slice, Head, Head]]:
    """The same parts of the vocabulary of both heads, half as wide as those of one head."""
    widest = max(num_rows, student.weight.shape[1], teacher.weight.shape[1])
    width = tile_width(2 * widest, student.weight.is_cuda)
    for first in range(0, len(student.weight), width):
        columns = slice(first, first + width)
        yield columns, student.part(columns), teacher.part(columns)


class _Running:
    """logsumexp of the tiles so far, and the expectation of a value under their softmax."""

    def __init__(self, like: torch.Tensor) -> None:
        self.base = like.new_full((len(like),), -torch.inf, dtype=torch.float32)
        self.total, self.weighted = torch.zeros_like(self.base), torch.zeros_like(self.base)

    def add(self, logits: torch.Tensor, values: torch.Tensor | None) -> None:
        """Adds a tile: logits and values `[N, columns]`."""
        base = torch.maximum(self.base, logits.amax(1))
        fading = torch.exp(self.base - base)
        exps = torch.exp(logits - base[:, None])
        self.total = self.total * fading + exps.sum(1)
        if values is not None:
            self.weighted = self.weighted * fading + torch.linalg.vecdot(exps, values)
        self.base = base

    @property
    def log_total(self) -> torch.Tensor:
        """logsumexp of the logits, `[N]`."""
        return self.base + self.total.log()

    @property
    def mean(self) -> torch.Tensor:
        """Expectation of the values, `[N]`."""
        return self.weighted / self.total


def _totals(hidden: torch.Tensor, taught: torch.Tensor, student: Head, teacher: Head, beta: float) -> _Totals:
    """The totals of some rows: one pass over the tiles, or two for a mixture."""
    own, other = _Running(hidden), _Running(hidden)
    for _, mine, theirs in _tiles(student, teacher, len(hidden)):
        logits, targets = mine.logits(hidden), theirs.logits(taught)
        own.add(logits, logits - targets if beta == 1 else None)
        other.add(targets, targets - logits if beta == 0 else None)
    log_q, log_p = own.log_total, other.log_total
    if beta == 0:
        return _Totals(log_q, log_p, other.mean - log_p + log_q, torch.full_like(log_q, -1.0))
    if beta == 1:
        divergence = own.mean - log_q + log_p
        return _Totals(log_q, log_p, divergence, divergence)
    divergence, slope = torch.zeros_like(log_q), torch.zeros_like(log_q)
    for _, mine, theirs in _tiles(student, teacher, len(hidden)):
        q, p = mine.logits(hidden).sub_(log_q[:, None]), theirs.logits(taught).sub_(log_p[:, None])
        mixture = _log_mixture(q, p, beta)
        of_student = torch.linalg.vecdot(q.exp(), q.sub_(mixture))
        divergence += beta * torch.linalg.vecdot(p.exp(), p.sub_(mixture)) + (1 - beta) * of_student
        slope += (1 - beta) * of_student
    return _Totals(log_q, log_p, divergence, slope)


def _gradient(
    student: Head, teacher: Head, hidden: torch.Tensor, taught: torch.Tensor, totals: _Totals, beta: float
) -> torch.Tensor:
    """`[N, columns]` fp32: the gradient of a tile's products."""
    logits = student.logits(hidden)
    slope = student.shape.slope(logits)
    log_q = logits.sub(totals.student[:, None])
    log_p = teacher.logits(taught).sub_(totals.teacher[:, None])
    q = log_q.exp()
    if beta == 0:
        gradient = q.sub_(log_p.exp_())
    elif beta == 1:
        gradient = log_q.sub_(log_p).sub_(totals.slope[:, None]).mul_(q)
    else:
        gradient = log_q.sub(_log_mixture(log_q, log_p, beta)).mul_(1 - beta).sub_(totals.slope[:, None]).mul_(q)
    return gradient.mul_(slope)


def _log_mixture(log_q: torch.Tensor, log_p: torch.Tensor, beta: float) -> torch.Tensor:
    """log(beta p + (1 - beta) q)."""
    weight = log_q.new_tensor(beta)
    return torch.logaddexp(log_p + weight.log(), log_q + (-weight).log1p())
