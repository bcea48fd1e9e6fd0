"""Divergence of a student's distribution over tokens from a teacher's, from hidden states and heads.

    forward KL, beta = 0:    D = sum_v p_v log(p_v / q_v)               p: teacher, q: student
    reverse KL, beta = 1:    D = sum_v q_v log(q_v / p_v)
    otherwise:               D = beta KL(p || m) + (1 - beta) KL(q || m)        m = beta p + (1 - beta) q

The generalized Jensen-Shannon divergence of Agarwal et al. 2023 (GKD, arXiv:2306.13649, equation 1); beta is that of
TRL's GKD trainer. With logit_v of the student and g_v = dD / dq_v

    dD / d logit_v = q_v (g_v - sum_u q_u g_u)        g_v = -p_v / q_v,  log(q_v / p_v) + 1,  (1 - beta) log(q_v / m_v)

Neither head's `[N, V]` logits ever exist: both are computed in the same tiles of the vocabulary, once for the two
KLs, whose sums over p and q are kept with a running maximum, and twice for a mixture, which needs both normalizers
first. The teacher is frozen. A backward pass with a trained head computes the tiles again. If the student's head is
frozen too, the gradient of the hidden states is computed in the forward pass, from the logits of a few tokens at a
time, which are kept until their normalizers are known: three products in place of six. The Triton kernels
(`linear_divergence_kernels.py`), whose tiles stay in registers, compute them again also for a frozen head.

`linear_top_divergence` compares K + 1 classes: K tokens that the teacher names, and the rest of the vocabulary as one.
Merging classes lowers a divergence, so it is a lower bound of the one above; K = V gives that one. The probability of
the rest is a sum over the tiles, not 1 minus the others, whose rounding would be most of a small one. Log-probability
c_k of class k has

    d c_k / d logit_v = [v in class k] q_v / q(class k) - q_v

N tokens, K tokens of a teacher, V vocabulary, E and F the hidden sizes of student and teacher.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from hybrid_engine.ops import linear_divergence_kernels as kernels
from hybrid_engine.ops.dispatch import check_tensor, kernel_or_reference, use_triton
from hybrid_engine.ops.linear_log_prob_tiles import (
    LEAST_LOGIT,
    PLAIN,
    Head,
    HeadPair,
    LogitShape,
    add_product,
    exp_rows,
    far_of,
    product_fp32,
    raised_base,
    times,
)

__all__ = [
    "HeadStates",
    "TopTokens",
    "class_entropy",
    "divergence",
    "linear_divergence",
    "linear_top_divergence",
    "log_rest",
    "top_divergence",
    "top_tokens",
]

ROWS_AT_ONCE = 2048
BYTES_AT_ONCE = 3 * 2**25
"""Bytes of the fp32 logits of both heads of a few tokens, which are kept while the student's head is frozen."""
LEAST_REST = 1e-7
"""Least probability of the rest: rounding of the others' log-probabilities, which sum to 1 or more where it is 0."""


class HeadStates(NamedTuple):
    """A teacher's hidden states of the same tokens, and its head."""

    hidden: torch.Tensor
    """`[N, F]`."""
    weight: torch.Tensor
    """`[V, F]`."""
    bias: torch.Tensor | None = None
    """`[V]`."""
    shape: LogitShape = PLAIN
    """Temperature, scale and softcap of its logits."""


class TopTokens(NamedTuple):
    """A teacher's log-probabilities of K tokens at each position."""

    ids: torch.Tensor
    """`[N, K]` int64, different ones in a row; -1 where fewer are known."""
    logprobs: torch.Tensor
    """`[N, K]` fp32; ignored where the id is -1."""
    log_rest: torch.Tensor | None = None
    """`[N]` fp32, log of the probability of all other tokens; None: it is 1 minus the sum of those in `logprobs`."""

    def all_but_listed(self) -> torch.Tensor:
        """`log_rest`, computed if it is None."""
        if self.log_rest is not None:
            return self.log_rest
        return log_rest(self.logprobs.masked_fill(self.ids < 0, -torch.inf).logsumexp(1))


def linear_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: HeadStates,
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
    _check(hidden, weight, beta, bias, shape)
    teacher.shape.check()
    if teacher.bias is not None:
        check_tensor("teacher.bias", teacher.bias, like=teacher.hidden, shape=(len(weight),))
    check_tensor("teacher.hidden", teacher.hidden, shape=(len(hidden), None))
    check_tensor("teacher.weight", teacher.weight, like=teacher.hidden, shape=(len(weight), teacher.hidden.shape[1]))
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearDivergence.apply(hidden, weight, bias, teacher, beta, shape)


def linear_top_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: TopTokens,
    beta: float,
    bias: torch.Tensor | None = None,
    shape: LogitShape = PLAIN,
) -> torch.Tensor:
    """Returns `[N]` fp32, in nats, the divergence over the teacher's K tokens and the rest as one class.

    Differentiable in hidden, weight and bias; a second derivative is an error. Ids from V on count as unknown. A rest
    that has no token on one side is left out.

    Args: as in `linear_divergence`, but for the teacher.

    Raises:
        ValueError: beta is not between 0 and 1, or shapes, dtypes or devices do not fit.
    """
    _check(hidden, weight, beta, bias, shape)
    check_tensor("teacher.ids", teacher.ids, shape=(len(hidden), None))
    check_tensor("teacher.logprobs", teacher.logprobs, shape=tuple(teacher.ids.shape))
    if teacher.log_rest is not None:
        check_tensor("teacher.log_rest", teacher.log_rest, shape=(len(hidden),))
    ids = torch.where(teacher.ids < len(weight), teacher.ids, -1)
    with torch.autocast(hidden.device.type, enabled=False):
        student = _ClassLogProbs.apply(hidden, weight, bias, ids, shape)
    return _over_classes(student, teacher._replace(ids=ids), beta)


def top_divergence(student: torch.Tensor, teacher: TopTokens, beta: float) -> torch.Tensor:
    """Returns `[N]`, the same of a student's log-probabilities `[N, V]` that are in memory; differentiable in them."""
    ids = torch.where(teacher.ids < student.shape[1], teacher.ids, -1)
    chosen = student.gather(1, ids.clamp(min=0))
    is_outside = torch.ones_like(student, dtype=torch.bool).scatter_reduce_(1, ids.clamp(min=0), ids < 0, "amin")
    rest = student.masked_fill(~is_outside, LEAST_LOGIT).logsumexp(1)
    return _over_classes(torch.cat([chosen, rest[:, None]], dim=1), teacher._replace(ids=ids), beta)


def class_entropy(teacher: TopTokens) -> torch.Tensor:
    """Returns `[N]`, the entropy in nats of a teacher's K tokens and the rest as one class."""
    logprobs = torch.cat([teacher.logprobs, teacher.all_but_listed()[:, None]], dim=1)
    is_class = torch.cat([teacher.ids >= 0, logprobs[:, -1:] > LEAST_LOGIT / 2], dim=1)
    logprobs = logprobs.masked_fill(~is_class, 0.0)
    return -(logprobs.exp() * logprobs).sum(1)


def log_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(logprobs)), of any shape: of the probability of everything else, which is at least 1e-7."""
    return (-torch.expm1(logprobs)).clamp(min=LEAST_REST).log()


@torch.no_grad()
def top_tokens(teacher: HeadStates, num_tokens: int) -> TopTokens:
    """The `num_tokens` most likely tokens of each position, K; with a smaller vocabulary the last ids of a row are -1.

    The logits exist in tiles.
    """
    parts = [_top_of_rows(teacher, rows, num_tokens) for rows in teacher.hidden.split(ROWS_AT_ONCE)]
    return TopTokens(*(torch.cat(part) for part in zip(*parts, strict=True)))


def divergence(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """Returns `[...]`, the same of log-probabilities `[..., V]` that are in memory; differentiable in both."""
    if beta == 0:
        return (teacher.exp() * (teacher - student)).sum(-1)
    if beta == 1:
        return (student.exp() * (student - teacher)).sum(-1)
    mixture = _log_mixture(student, teacher, beta)
    of_teacher = (teacher.exp() * (teacher - mixture)).sum(-1)
    return beta * of_teacher + (1 - beta) * (student.exp() * (student - mixture)).sum(-1)


def _check(
    hidden: torch.Tensor, weight: torch.Tensor, beta: float, bias: torch.Tensor | None, shape: LogitShape
) -> None:
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta} must be between 0 (forward KL) and 1 (reverse KL)")
    shape.check()
    check_tensor("hidden", hidden, shape=(None, None))
    check_tensor("weight", weight, like=hidden, shape=(None, hidden.shape[1]))
    if bias is not None:
        check_tensor("bias", bias, like=hidden, shape=(len(weight),))


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
    def forward(ctx, hidden, *arguments):
        if use_triton(hidden):
            return kernel_or_reference(_forward_in_kernels, _forward_in_torch, ctx, hidden, *arguments)
        return _forward_in_torch(ctx, hidden, *arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx, above):
        if ctx.is_made:
            (gradient,) = ctx.saved_tensors
            return (gradient * above[:, None]).to(gradient.dtype), *[None] * 5
        hidden, weight, bias, taught, taught_weight, taught_bias, *totals = ctx.saved_tensors
        above = above.contiguous()  # a sum's gradient is one number in memory
        shape, taught_shape = ctx.shapes
        whole = HeadPair(hidden, Head(weight, bias, shape), taught, Head(taught_weight, taught_bias, taught_shape))
        found = _Gradients(ctx.needs_input_grad, hidden, weight, bias)
        gradient_of: Callable[..., torch.Tensor] = _gradient
        if ctx.in_kernels:
            gradient_of = partial(kernel_or_reference, _gradient_in_kernels, _gradient)
        with torch.autocast(hidden.device.type, enabled=False):
            for columns, pair in whole.tiles(min(len(hidden), ROWS_AT_ONCE)):
                for rows in _row_parts(hidden, ROWS_AT_ONCE):
                    some = _Totals(*(part[rows] for part in totals))
                    of_products = gradient_of(pair.rows(rows), some, above[rows], ctx.beta)
                    found.add(columns, rows, pair.student, of_products)
                    del of_products  # before the next tile is computed
        return (*found.results(), None, None, None)


def _forward_in_kernels(ctx, *arguments):
    return _forward(ctx, True, *arguments)


def _forward_in_torch(ctx, *arguments):
    return _forward(ctx, False, *arguments)


def _forward(ctx, in_kernels, hidden, weight, bias, teacher, beta, shape):
    of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
    ctx.in_kernels = in_kernels
    ctx.is_made = of_hidden and not (of_weight or of_bias or in_kernels)
    taught = Head(teacher.weight, teacher.bias, teacher.shape)
    whole = HeadPair(hidden, Head(weight, bias, shape), teacher.hidden, taught)
    if ctx.is_made:
        values, gradient = torch.zeros_like(hidden[:, 0], dtype=torch.float32), torch.zeros_like(hidden)
        for rows in _row_parts(hidden, max(1, BYTES_AT_ONCE // (8 * len(weight)))):
            values[rows], gradient[rows] = _value_and_gradient(whole.rows(rows), beta)
        ctx.save_for_backward(gradient)
        return values
    totals_of = _totals_in_kernels if in_kernels else _totals
    parts = [totals_of(whole.rows(rows), beta) for rows in _row_parts(hidden, ROWS_AT_ONCE) or [slice(0)]]
    totals = _Totals(*map(torch.cat, zip(*parts, strict=True)))
    ctx.beta, ctx.shapes = beta, (shape, teacher.shape)
    ctx.save_for_backward(hidden, weight, bias, *teacher[:3], *totals)
    return totals.divergence


class _ClassLogProbs(torch.autograd.Function):
    """`[N, K + 1]` fp32: log-probabilities of the tokens `ids [N, K]`, and of all others together."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, ids, shape):
        head = Head(weight, bias, shape)
        parts = zip(hidden.split(ROWS_AT_ONCE), ids.split(ROWS_AT_ONCE), strict=True)
        classes = torch.cat([_class_logits(head, *part) for part in parts])
        log_total = classes.logsumexp(1)
        ctx.shape = shape
        ctx.save_for_backward(hidden, weight, bias, ids, log_total, classes[:, -1])
        return classes - log_total[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx, above):
        hidden, weight, bias, ids, log_total, log_rest = ctx.saved_tensors
        head = Head(weight, bias, ctx.shape)
        found = _Gradients(ctx.needs_input_grad, hidden, weight, bias)
        with torch.autocast(hidden.device.type, enabled=False):
            for columns, tile in head.tiles(min(len(hidden), ROWS_AT_ONCE)):
                for rows in _row_parts(hidden, ROWS_AT_ONCE):
                    logits, places = tile.logits(hidden[rows]), _InTile.of(ids[rows] - columns.start, tile)
                    slope = head.shape.slope(logits)
                    of_products = logits.sub(log_total[rows, None]).exp_().mul_(-above[rows].sum(1)[:, None])
                    of_rest = places.without(logits).sub_(log_rest[rows, None]).exp_()
                    of_products.add_(of_rest.mul_(above[rows, -1:]))
                    places.add_to(of_products, above[rows, :-1])
                    found.add(columns, rows, tile, of_products.mul_(slope))
                    del logits, of_products, of_rest  # before the next tile is computed
        return (*found.results(), None, None)


class _Gradients:
    """Sums of the gradients of hidden states, head and bias over the tiles."""

    def __init__(
        self, needs: tuple[bool, ...], hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self.of = (hidden, weight, bias)
        self.hidden, self.weight, self.bias = (
            torch.zeros_like(x, dtype=torch.float32) if x is not None and needed else None
            for x, needed in zip(self.of, needs[:3], strict=True)
        )

    def add(self, columns: slice, rows: slice, tile: Head, of_products: torch.Tensor) -> None:
        """Adds a tile: the gradient of its products, `[rows, columns]` fp32."""
        hidden, of_products = self.of[0], of_products.to(tile.weight.dtype)
        if self.hidden is not None:
            add_product(self.hidden[rows], of_products, tile.weight)
        if self.weight is not None:
            self.weight[columns] += product_fp32(of_products.t(), hidden[rows])
        if self.bias is not None:
            self.bias[columns] += of_products.sum(0, dtype=torch.float32)

    def results(self) -> tuple[torch.Tensor | None, ...]:
        """The gradients of hidden states, weight and bias, in their dtypes; None where none is needed."""
        found = zip((self.hidden, self.weight, self.bias), self.of, strict=True)
        return tuple(None if made is None else made.to(x.dtype) for made, x in found)


class _InTile(NamedTuple):
    """Tokens of each row in a tile."""

    places: torch.Tensor
    """`[N, K]`: their columns, arbitrary if they are in another tile."""
    is_inside: torch.Tensor
    """`[N, K]` bool."""

    @classmethod
    def of(cls, places: torch.Tensor, tile: Head) -> "_InTile":
        """`places`: counted from the tile's first column."""
        width = len(tile.weight)
        return cls(places.clamp(0, width - 1), (places >= 0) & (places < width))

    def take(self, logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """`[N, K]`: the tokens' logits of the tile, `others` of tokens in another one."""
        return torch.where(self.is_inside, logits.gather(1, self.places), others)

    def without(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` with `LEAST_LOGIT` in place of the tokens'; overwrites them."""
        least = torch.where(self.is_inside, LEAST_LOGIT, torch.inf)
        return logits.scatter_reduce_(1, self.places, least, "amin")

    def add_to(self, gradient: torch.Tensor, values: torch.Tensor) -> None:
        """Adds `values [N, K]` to the tokens' columns."""
        gradient.scatter_add_(1, self.places, torch.where(self.is_inside, values, 0.0))


def _row_parts(hidden: torch.Tensor, num_rows: int) -> list[slice]:
    return [slice(first, first + num_rows) for first in range(0, len(hidden), num_rows)]


class _Running:
    """Sums of exp(logit - base) over the tiles so far, alone and times a value.

    `base` is near the largest logit of a row: the largest of the first tile, until a later one is far above it.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        self.far = far_of(hidden.dtype)
        self.base = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)
        self.total, self.weighted = torch.zeros_like(self.base), torch.zeros_like(self.base)

    def add(self, logits: torch.Tensor, values: torch.Tensor | None = None) -> None:
        """Adds a tile, logits and values `[N, columns]`; overwrites the logits."""
        raised = raised_base(self.base, logits.amax(1), self.far)
        if raised is not None:
            self.base, fading = raised
            self.total.mul_(fading)
            self.weighted.mul_(fading)
        self.total += exp_rows(logits, self.base)
        if values is not None:
            self.weighted += torch.linalg.vecdot(logits, values)

    @property
    def log_total(self) -> torch.Tensor:
        """logsumexp of the logits, `[N]`."""
        return self.base + self.total.log()

    @property
    def mean(self) -> torch.Tensor:
        """Expectation of the values, `[N]`."""
        return self.weighted / self.total


def _totals(pair: HeadPair, beta: float) -> _Totals:
    if beta == 0:
        return _forward_kl(pair)
    return _reverse_kl(pair) if beta == 1 else _mixed(pair, beta)


def _forward_kl(pair: HeadPair) -> _Totals:
    own, other = _Running(pair.hidden), _Running(pair.hidden)
    for _, tile in pair.tiles(len(pair.hidden)):
        logits, targets = tile.logits()
        values = targets - logits
        own.add(logits)
        other.add(targets, values)
        del logits, targets, values  # before the next tile is computed
    log_q, log_p = own.log_total, other.log_total
    return _Totals(log_q, log_p, other.mean - log_p + log_q, torch.full_like(log_q, -1.0))


def _reverse_kl(pair: HeadPair) -> _Totals:
    own, other = _Running(pair.hidden), _Running(pair.hidden)
    center = torch.zeros_like(own.base)
    for columns, tile in pair.tiles(len(pair.hidden)):
        logits, targets = tile.logits()
        if columns.start == 0:
            center = _distance(logits, targets)
        values = logits.sub(targets).sub_(center[:, None])
        own.add(logits, values)
        other.add(targets)
        del logits, targets, values  # before the next tile is computed
    log_q, log_p = own.log_total, other.log_total
    divergence = own.mean + center - log_q + log_p
    return _Totals(log_q, log_p, divergence, divergence)


def _mixed(pair: HeadPair, beta: float) -> _Totals:
    own, other = _Running(pair.hidden), _Running(pair.hidden)
    for _, tile in pair.tiles(len(pair.hidden)):
        logits, targets = tile.logits()
        own.add(logits)
        other.add(targets)
        del logits, targets  # before the next tile is computed
    log_q, log_p = own.log_total, other.log_total
    of_teacher, of_student = torch.zeros_like(log_q), torch.zeros_like(log_q)
    for _, tile in pair.tiles(len(pair.hidden)):
        logits, targets = tile.logits()
        found = _kls(logits.sub_(log_q[:, None]), targets.sub_(log_p[:, None]), beta)
        of_teacher, of_student = of_teacher + found[0], of_student + found[1]
        del logits, targets  # before the next tile is computed
    return _totals_of_kls(log_q, log_p, of_teacher, of_student, beta)


def _value_and_gradient(pair: HeadPair, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The divergences of a few tokens `[N]`, and `[N, E]` fp32 the gradients of their hidden states.

    All logits of these tokens exist at once, in tiles, less the largest of the token.
    """
    tiles = [(tile, *tile.logits()) for _, tile in pair.tiles(len(pair.hidden))]
    _, of_student_tiles, of_teacher_tiles = zip(*tiles, strict=True)
    largest, log_q = _lowered(of_student_tiles)
    _, log_p = _lowered(of_teacher_tiles)
    of_teacher, of_student = torch.zeros_like(log_q), torch.zeros_like(log_q)
    for _, logits, targets in tiles:
        found = _kls(logits - log_q[:, None], targets - log_p[:, None], beta)
        of_teacher, of_student = of_teacher + found[0], of_student + found[1]
    totals = _totals_of_kls(log_q, log_p, of_teacher, of_student, beta)
    gradient, above = torch.zeros_like(pair.hidden, dtype=torch.float32), torch.ones_like(log_q)
    for tile, logits, targets in tiles:
        shape = tile.student.shape
        slope = shape.slope(logits if shape.softcap is None else logits + largest[:, None])
        of_products = _gradient_of_logits(slope, logits, targets, totals, above, beta)
        add_product(gradient, of_products.to(tile.student.weight.dtype), tile.student.weight)
    return totals.divergence, gradient


def _lowered(tiles: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each token, which is taken from all, and the logsumexp of what is left; `[N]` each.

    Of large logits the logsumexp itself would have few digits.
    """
    largest = torch.stack([tile.amax(1) for tile in tiles]).amax(0)
    return largest, torch.stack([tile.sub_(largest[:, None]).logsumexp(1) for tile in tiles]).logsumexp(0)


def _kls(log_q: torch.Tensor, log_p: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`[N]` each: KL(p || m) and KL(q || m) over a tile, which it overwrites; m is q for beta = 0, and p for 1."""
    if beta == 0:
        return torch.linalg.vecdot(log_p.exp(), log_p.sub_(log_q)), torch.zeros_like(log_q[:, 0])
    if beta == 1:
        return torch.zeros_like(log_q[:, 0]), torch.linalg.vecdot(log_q.exp(), log_q.sub_(log_p))
    mixture = _log_mixture(log_q, log_p, beta)
    of_teacher = torch.linalg.vecdot(log_p.exp(), log_p.sub_(mixture))
    return of_teacher, torch.linalg.vecdot(log_q.exp(), log_q.sub_(mixture))


def _totals_of_kls(
    log_q: torch.Tensor, log_p: torch.Tensor, of_teacher: torch.Tensor, of_student: torch.Tensor, beta: float
) -> _Totals:
    """The totals from `_kls` of the whole vocabulary."""
    if beta == 0:
        return _Totals(log_q, log_p, of_teacher, torch.full_like(log_q, -1.0))
    slope = of_student if beta == 1 else (1 - beta) * of_student
    return _Totals(log_q, log_p, slope if beta == 1 else beta * of_teacher + slope, slope)


def _totals_in_kernels(pair: HeadPair, beta: float) -> _Totals:
    log_q, log_p, mean = kernels.merged(kernels.partial_sums(pair, beta), beta)
    if beta == 0:
        return _Totals(log_q, log_p, log_q - log_p - mean, torch.full_like(log_q, -1.0))
    if beta == 1:
        divergence = mean - log_q + log_p
        return _Totals(log_q, log_p, divergence, divergence)
    return _totals_of_kls(log_q, log_p, *kernels.mixture_sums(pair, log_q, log_p, beta), beta)


def _distance(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """`[N]`: about the constant between both models' logits, which must not be most of a value that is rounded."""
    largest, largest_target = logits.amax(1), targets.amax(1)
    is_logit = torch.minimum(largest, largest_target) > LEAST_LOGIT / 2
    return torch.where(is_logit, largest - largest_target, 0.0)


def _gradient(tile: HeadPair, totals: _Totals, above: torch.Tensor, beta: float) -> torch.Tensor:
    """`[N, columns]` fp32: the gradient of a tile's products, times `above [N]`."""
    logits, targets = tile.logits()
    return _gradient_of_logits(tile.student.shape.slope(logits), logits, targets, totals, above, beta)


def _gradient_of_logits(
    slope: torch.Tensor | float,
    logits: torch.Tensor,
    targets: torch.Tensor,
    totals: _Totals,
    above: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    """The same of a tile's logits, of student and teacher, which it overwrites; `slope` as `LogitShape` has it."""
    if beta == 0:
        exp_rows(logits, totals.student, above)
        exp_rows(targets, totals.teacher, above)
        return times(logits.sub_(targets), slope)
    if beta == 1:
        values = torch.sub(logits, targets, out=targets).sub_((totals.student - totals.teacher + totals.slope)[:, None])
    else:
        log_q, log_p = logits - totals.student[:, None], targets.sub_(totals.teacher[:, None])
        values = log_q.sub_(_log_mixture(log_q, log_p, beta)).mul_(1 - beta).sub_(totals.slope[:, None])
    exp_rows(logits, totals.student, above)
    return times(values.mul_(logits), slope)


def _gradient_in_kernels(tile: HeadPair, totals: _Totals, above: torch.Tensor, beta: float) -> torch.Tensor:
    rows = kernels.TotalPointers(totals.student, totals.teacher, totals.slope, above)
    return kernels.gradient_of_products(tile, rows, beta)


def _class_logits(head: Head, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`[N, K + 1]` fp32: the logits of `ids`, and the logsumexp of all others."""
    chosen, rest = torch.full_like(ids, LEAST_LOGIT, dtype=torch.float32), _Running(hidden)
    for columns, tile in head.tiles(len(hidden)):
        logits, places = tile.logits(hidden), _InTile.of(ids - columns.start, tile)
        chosen = places.take(logits, chosen)
        rest.add(places.without(logits))
        del logits  # before the next tile is computed
    return torch.cat([chosen, rest.log_total[:, None]], dim=1)


def _top_of_rows(teacher: HeadStates, hidden: torch.Tensor, num_tokens: int) -> TopTokens:
    best = hidden.new_full((len(hidden), num_tokens), LEAST_LOGIT, dtype=torch.float32)
    ids, rest = torch.full_like(best, -1, dtype=torch.int64), _Running(hidden)
    for columns, tile in Head(teacher.weight, teacher.bias, teacher.shape).tiles(len(hidden)):
        logits = torch.cat([best, tile.logits(hidden)], dim=1)
        best, places = logits.topk(num_tokens, dim=1)
        earlier = ids.gather(1, places.clamp(max=num_tokens - 1))
        ids = torch.where(places < num_tokens, earlier, columns.start + places - num_tokens)
        rest.add(logits.scatter_(1, places, LEAST_LOGIT))
        del logits  # before the next tile is computed
    log_total = torch.cat([best, rest.log_total[:, None]], dim=1).logsumexp(1)
    return TopTokens(ids, best - log_total[:, None], rest.log_total - log_total)


def _over_classes(student: torch.Tensor, teacher: TopTokens, beta: float) -> torch.Tensor:
    """`[N]`: the divergence of log-probabilities `[N, K + 1]` of the teacher's tokens and the rest."""
    is_known, log_rest = teacher.ids >= 0, teacher.all_but_listed()
    has_rest = (student[:, -1] > LEAST_LOGIT / 2) & (log_rest > LEAST_LOGIT / 2)
    is_class = torch.cat([is_known, has_rest[:, None]], dim=1)
    taught = torch.cat([teacher.logprobs, log_rest[:, None]], dim=1).to(student.dtype)
    # Classes without tokens get the same number on both sides, which adds 0.
    return divergence(student.masked_fill(~is_class, 0.0), taught.masked_fill(~is_class, 0.0), beta)


def _log_mixture(log_q: torch.Tensor, log_p: torch.Tensor, beta: float) -> torch.Tensor:
    """log(beta p + (1 - beta) q)."""
    weight = log_q.new_tensor(beta)
    return torch.logaddexp(log_p + weight.log(), log_q + (-weight).log1p())
